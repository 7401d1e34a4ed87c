"""A rank's part of an order that all ranks draw alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from eventloop import TaskError
from eventloop.data.loaders import loader_of
from eventloop.data.sharding import RankPart, shared_order


def sharded_for_training(dataloader, state):
    return loader_of(dataloader).training_shard(state)


def sharded_for_evaluation(dataloader, state):
    return loader_of(dataloader).evaluation_shard(state)


def orders(seed, num_epochs=3, num_ranks=2):
    """Returns what each rank draws in each epoch."""
    sampler = WeightedRandomSampler([1.0] * 12, 12)
    parts = [RankPart(sampler, rank, num_ranks, seed, "pad") for rank in range(num_ranks)]
    drawn = []
    for epoch in range(num_epochs):
        for part in parts:
            part.set_epoch(epoch)
        drawn.append([list(map(int, part)) for part in parts])
    return drawn


def test_each_epoch_has_another_order():
    """A sampler of the user's own would otherwise give the same samples again and again."""
    first, second, third = orders(seed=0)

    assert first != second != third != first


def test_all_ranks_draw_one_order_and_another_with_another_seed():
    """They take turns in it: an order of each one's own would repeat and miss samples."""
    ranks = orders(seed=0)[0]
    torch.manual_seed(0)
    whole = list(WeightedRandomSampler([1.0] * 12, 12))

    assert [one for pair in zip(*ranks, strict=True) for one in pair] == whole
    assert orders(seed=1) != orders(seed=0)


@pytest.mark.parametrize(
    ("even", "parts"), [("pad", [[0, 2, 4], [1, 3, 0]]), ("drop", [[0, 2], [1, 3]])]
)
def test_ranks_get_as_many_samples(even, parts):
    """A rank with one batch more would wait for the others."""
    sampler = SequentialSampler(range(5))

    assert [list(RankPart(sampler, rank, 2, None, even)) for rank in range(2)] == parts


def test_fewer_batches_than_ranks_are_told():
    """Of a batch sampler, too; of a rank without any a message would blame the iterable."""
    samples = [(torch.zeros(3), 0)] * 4
    loader = DataLoader(samples, batch_sampler=[[0, 1], [2, 3]])
    state = SimpleNamespace(
        data_world_size=3, data_rank=0, settings=SimpleNamespace(uneven="pad", seed=0)
    )

    with pytest.raises(TaskError, match="has 2 batches, fewer than the 3 ranks"):
        sharded_for_training(loader, state)


@pytest.mark.parametrize("sampler", [SequentialSampler(range(4)), RandomSampler(range(4))])
def test_samples_that_a_sampler_leaves_out_stay_out(sampler):
    """One of torch's over a part of the data is no order of all of it."""
    samples = [(torch.zeros(3), idx) for idx in range(12)]
    loader, seen = DataLoader(samples, batch_size=2, sampler=sampler), []

    for rank in range(2):
        settings = SimpleNamespace(uneven="pad", seed=0)
        state = SimpleNamespace(data_world_size=2, data_rank=rank, settings=settings)
        seen += [one for _, idx in sharded_for_training(loader, state) for one in idx.tolist()]

    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("shard", [sharded_for_training, sharded_for_evaluation])
def test_a_sampler_without_a_length_is_told(shard):
    """It may have no end; a TypeError about `len` wouldn't say what to do."""
    samples = [(torch.zeros(3), 0)] * 4
    loader = DataLoader(samples, batch_size=2, sampler=iter(range(4)))
    settings = SimpleNamespace(uneven="pad", seed=0)
    state = SimpleNamespace(data_world_size=2, data_rank=0, settings=settings)

    with pytest.raises(TaskError, match=r"without a length[\s\S]*__len__"):
        shard(loader, state)


class ByEpoch(Sampler):
    """Has another order in each epoch, of which it is told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.arange(8).roll(self.epoch).tolist())


def state_of(rank, world_size=2):
    settings = SimpleNamespace(uneven="pad", seed=0)
    return SimpleNamespace(data_world_size=world_size, data_rank=rank, settings=settings)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("by_batches", [False, True])
def test_a_sampler_within_others_is_told_the_epoch(num_ranks, by_batches):
    """It would have the same order in each."""
    samples, sampler = torch.arange(8), ByEpoch()
    given = {"batch_size": 2, "sampler": sampler}
    if by_batches:
        given = {"batch_sampler": BatchSampler(sampler, 2, False)}
    loader = DataLoader(samples, **given)
    loaders = [sharded_for_training(loader, state_of(rank)) for rank in range(num_ranks)]
    loaders = loaders if num_ranks > 1 else [loader]

    for epoch in range(3):
        for one in loaders:
            loader_of(one).set_epoch(epoch)
        firsts = [next(iter(one))[0].item() for one in loaders]

        second = 2 if by_batches else 1
        assert firsts == [-epoch % 8, (second - epoch) % 8][:num_ranks]


@pytest.mark.parametrize("shard", [sharded_for_training, sharded_for_evaluation])
def test_batches_of_a_sampler_that_knows_its_rank_are_split_once(shard):
    """Each rank would see a part of its part, and half of the data would be seen by none."""
    samples, seen = torch.arange(16), []

    for rank in range(2):
        sampler = DistributedSampler(samples, 2, rank, shuffle=False)
        loader = DataLoader(samples, batch_sampler=BatchSampler(sampler, 2, False))
        seen += torch.cat([*shard(loader, state_of(rank))]).tolist()

    assert sorted(seen) == list(range(16))
    assert shared_order(loader_of(loader)) == {"kind": "its own batches", "ranks": 2}


class Scaled(DataLoader):
    """A data loader of a user's own, with an option of its own."""

    def __init__(self, *args, factor=1, **options):
        super().__init__(*args, **options)
        self.factor = factor

    def __iter__(self):
        return (batch * self.factor for batch in super().__iter__())


@pytest.mark.parametrize("shard", [sharded_for_training, sharded_for_evaluation])
@pytest.mark.parametrize("by_batches", [False, True])
def test_a_loader_keeps_its_own_options(shard, by_batches):
    """Made anew from those that torch knows, its batches would be others."""
    given = {"batch_sampler": BatchSampler(range(8), 2, False)} if by_batches else {"batch_size": 2}
    loader, seen = Scaled(torch.arange(8), factor=10, **given), []

    for rank in range(2):
        seen += torch.cat([*shard(loader, state_of(rank))]).tolist()

    assert sorted(seen) == list(range(0, 80, 10))
    assert torch.cat([*loader]).tolist() == list(range(0, 80, 10))
