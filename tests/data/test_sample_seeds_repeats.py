"""Samples that come again are told apart."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from eventloop.data.sample_seeds import RepeatedIndex, mark_repeats, may_repeat


def times(indices):
    return [one.times if type(one) is RepeatedIndex else 0 for one in indices]


def test_what_comes_again_knows_how_often_it_was_there():
    """And stays the index that it is."""
    found = list(mark_repeats([3, 1, 3, 3, 1]))

    assert found == [3, 1, 3, 3, 1]
    assert times(found) == [0, 0, 1, 2, 1]
    assert "abc"[found[4]] == "b"


def test_batches_are_numbered_together():
    """An epoch is."""
    found = list(mark_repeats([[1, 2], [2, 1], [2]]))

    assert [times(batch) for batch in found] == [[0, 0], [1, 1], [2]]


def test_any_whole_number_is_an_index():
    """Names and pairs stay as they are."""
    found = list(
        mark_repeats([np.int64(2), torch.tensor(2), 2, "a", "a", (1, 2), RepeatedIndex(2, 7)])
    )

    assert times(found[:3]) == [0, 1, 2]
    assert found[3:5] == ["a", "a"]
    assert found[6].times == 7


def test_it_can_be_sent_to_a_worker():
    """Indices are pickled on the way."""
    found = pickle.loads(pickle.dumps(RepeatedIndex(3, 2)))

    assert (found, found.times) == (3, 2)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (SequentialSampler(range(4)), False),
        (RandomSampler(range(4)), False),
        (RandomSampler(range(4), num_samples=2), False),
        (RandomSampler(range(4), num_samples=5), True),
        (RandomSampler(range(4), replacement=True), True),
        (SubsetRandomSampler([1, 1]), True),
        (WeightedRandomSampler([1.0], 4), True),
        (DistributedSampler(range(4), 2, 0), False),
        (BatchSampler(RandomSampler(range(4)), 2, False), False),
        (BatchSampler([1, 1], 2, False), True),
    ],
)
def test_samplers_that_give_each_once_are_known(sampler, expected):
    """They needn't be counted."""
    assert may_repeat(sampler) is expected
