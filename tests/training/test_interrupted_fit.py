"""What a fit that raised leaves for the next one."""

from __future__ import annotations

import pytest

from eventloop.errors import EventloopError
from eventloop.training.interrupted_fit import InterruptedFit, require_same_stage
from eventloop_testing import run_ranks


def interrupted_at(stage, *, may_have_stepped=False):
    return InterruptedFit(stage, True, may_have_stepped, None, None)


def test_a_batch_is_repeated_only_if_no_weight_can_have_changed():
    """Training on it twice would be wrong without a word."""
    assert interrupted_at("taken").repeats_batch
    assert not interrupted_at("taken", may_have_stepped=True).repeats_batch
    assert not interrupted_at("stepping").repeats_batch


@pytest.mark.parametrize("stage", ["idle", "taken", "stepping", "trained", "counted", "ending"])
def test_a_stage_is_in_an_epoch_or_after_one_but_not_both(stage):
    """What is outstanding is done at one place of the loop."""
    interrupted = interrupted_at(stage)

    assert not (interrupted.is_in_epoch and interrupted.is_after_epoch)
    assert interrupted.has_uncounted_batch == (stage in ("stepping", "trained"))


def at_different_stages():
    from eventloop.distributed import join_processes

    processes = join_processes()
    stage = "counted" if processes.rank else "scheduled"
    try:
        require_same_stage(processes, interrupted_at(stage))
    except EventloopError as error:
        return str(error)
    return ""


def test_ranks_that_raised_at_different_places_are_named():
    """They would wait for each other in different collectives."""
    first, second = run_ranks(at_different_stages)

    assert first == second
    assert "rank 0: scheduled, rank 1: counted" in first
