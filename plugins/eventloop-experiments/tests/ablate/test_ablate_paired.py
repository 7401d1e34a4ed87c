"""Differences between runs of the same seeds."""

from __future__ import annotations

import pytest
from scipy import stats

from eventloop_experiments.ablate.paired import Difference, paired_difference

BASE = {0: 0.91, 1: 0.84, 2: 0.97, 3: 0.88, 4: 0.93}
BETTER = {0: 0.92, 1: 0.86, 2: 0.98, 3: 0.90, 4: 0.94}


def test_the_interval_is_that_of_the_paired_t_test():
    """Against scipy."""
    expected = stats.ttest_rel(list(BETTER.values()), list(BASE.values())).confidence_interval(0.95)

    found = paired_difference(BETTER, BASE)

    assert (found.low, found.high) == pytest.approx(tuple(expected))
    assert found.mean == pytest.approx(0.014)
    assert (found.num_seeds, found.leaves_zero_out) == (5, True)


def test_without_the_pairs_the_difference_would_not_show():
    """A seed that is good for one is good for the other; that is what pairing is for."""
    shuffled = dict(zip(BASE, [BASE[seed] for seed in (3, 2, 0, 4, 1)], strict=True))

    assert paired_difference(BETTER, BASE).leaves_zero_out
    assert not paired_difference(BETTER, shuffled).leaves_zero_out


def test_seeds_that_one_lacks_do_not_count():
    """A run that failed takes its partner with it."""
    found = paired_difference(BETTER, {0: 0.91, 3: 0.88})

    assert found.num_seeds == 2
    assert paired_difference(BETTER, {}) is None
    assert paired_difference({0: 1.0}, {0: 0.75}) == Difference(0.25, None, None, 1)
