"""The kinds of data loaders: what follows from each."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from eventloop.data import cycled, zipped
from eventloop.data.combined import NoData
from eventloop.data.loaders import first_batch, known_length, loader_of


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(8))


SAMPLES = torch.arange(8)
LOADERS = {
    "list": (lambda: [1, 2, 3], 3, True, False),
    "map style": (lambda: DataLoader(SAMPLES, 2), 4, True, False),
    "without a length": (lambda: DataLoader(SAMPLES, 2, sampler=Unsized()), None, True, False),
    "sharded": (
        lambda: DataLoader(SAMPLES, 2, sampler=DistributedSampler(SAMPLES, 2, 0)), 2, False, False,
    ),
    "stream": (lambda: DataLoader(Stream(), 2), None, False, True),
    "generator": (lambda: iter(range(3)), None, False, True),
    "zipped": (lambda: zipped([1, 2], [1]), 1, False, False),
    "zipped with a stream": (lambda: zipped([1], DataLoader(Stream(), 2)), None, False, True),
    "cycled": (lambda: cycled([1, 2]), None, False, False),
    "none": (NoData, None, False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_length_and_shards_follow_from_the_kind(name):
    """A stream has to shard itself; a combined loader asks its parts."""
    make, num_batches, is_sharded_here, may_shard_itself = LOADERS[name]
    loader = loader_of(make())

    assert loader.num_batches == known_length(loader.dataloader) == num_batches
    assert loader.is_sharded_here is is_sharded_here
    assert loader.may_shard_itself is may_shard_itself


def test_a_combined_loader_is_looked_at_by_its_parts():
    """However they are nested."""
    first, second = [1], DataLoader(SAMPLES, 2)

    loader = loader_of(zipped(first, cycled(second)))

    assert [part.dataloader for part in loader.innermost()] == [first, second]


@pytest.mark.parametrize("make", [lambda: [5, 6], lambda: iter([5, 6])])
def test_the_first_batch_is_yielded_again(make):
    """Also by an iterator, which is used up."""
    batch, dataloader = first_batch(make())

    assert batch == 5
    assert list(dataloader) == [5, 6]
