"""Random draws of a data set are tied to seed, epoch and index."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from eventloop.data.feed import Feed
from eventloop.data.sample_seeds import RepeatedIndex, SampleSeeds, SeededDataset, seeded
from eventloop.distributed.processes import Processes
from eventloop.rng import host_generators


def draws():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


class Drawing(Dataset):
    """Each sample is its index and a number of each generator."""

    scale = 1.0

    def __init__(self, num=12):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, idx):
        return [int(idx), *draws()]


class Batched(Drawing):
    def __getitems__(self, indices):
        return [self[idx] for idx in indices]


class Failing(Drawing):
    def __getitem__(self, idx):
        random.random()
        raise OSError("unreadable")


def rows(dataloader, epoch=0, seed=3):
    """Returns an epoch's samples, index first, in the order of the index."""
    feed = Feed(dataloader, Processes(), sample_seed=seed)
    feed.start_epoch(epoch)
    found = []
    while feed.has_next():
        found += torch.stack(feed.next(), 1).tolist()
    return sorted(found)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_sample_draws_the_same_wherever_it_is_read(num_workers, batch_size):
    """In any process, in any order, in batches of any size."""
    torch.manual_seed(num_workers)
    given = {"shuffle": True, "num_workers": num_workers}

    assert rows(DataLoader(Drawing(), batch_size, **given)) == rows(DataLoader(Drawing(), 3))


def test_samples_epochs_and_seeds_draw_differently():
    """Also those that are neighbours; each of the generators."""
    loader = DataLoader(Drawing(100), 10)
    found = [rows(loader, epoch, seed) for epoch in range(3) for seed in range(3)]

    numbers = torch.tensor(found)[..., 1:]
    assert len(numbers.flatten().unique()) == numbers.numel()
    assert abs(numbers.mean() - 0.5) < 0.02


def test_workers_that_stay_see_the_epoch():
    """They have the data set that they were started with."""
    feed = Feed(
        DataLoader(Drawing(), 4, num_workers=2, persistent_workers=True),
        Processes(),
        sample_seed=3,
    )
    for epoch in range(3):
        feed.start_epoch(epoch)
        found = []
        while feed.has_next():
            found += torch.stack(feed.next(), 1).tolist()
        feed.end_epoch()

        assert found == rows(DataLoader(Drawing(), 4), epoch)


def test_without_a_seed_draws_are_those_of_the_generators():
    """Control, and what `seed_samples=False` asks for: a plain loop's draws."""
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = [torch.stack(one, 1).tolist() for one in DataLoader(Drawing(), 4, shuffle=True)]

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    actual = rows(DataLoader(Drawing(), 4, shuffle=True), seed=None)

    assert actual == sorted(row for batch in expected for row in batch)
    assert actual != rows(DataLoader(Drawing(), 4, shuffle=True))


@pytest.mark.parametrize("dataset", [Drawing, Batched])
def test_the_training_draws_as_if_samples_did_not(dataset):
    """Its generators stand where they stood, after each batch."""
    loader = DataLoader(dataset(), 4, collate_fn=lambda samples: [samples, draws()])
    feed = Feed(loader, Processes(), sample_seed=3)
    feed.start_epoch(0)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = [draws() for _ in range(3)]

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    actual = [(feed.next(), draws())[1] for _ in range(3)]

    assert actual == expected


def test_a_sample_that_fails_leaves_the_generators_alone():
    """Whoever catches that goes on drawing."""
    feed = Feed(DataLoader(Failing(), 4), Processes(), sample_seed=3)
    feed.start_epoch(0)
    random.seed(5)

    with pytest.raises(OSError, match="unreadable"):
        feed.next()

    assert random.random() == random.Random(5).random()


@pytest.mark.parametrize("data", [TensorDataset(torch.arange(12)), list(range(12)), Drawing()])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_draws_from_the_first_index(data, num_workers):
    """Masks and mixes are made there as often as in the data set."""
    given = {"collate_fn": collated, "num_workers": num_workers}

    def epoch(number):
        feed = Feed(DataLoader(data, 4, **given), Processes(), sample_seed=3)
        feed.start_epoch(number)
        return [feed.next() for _ in range(3)]

    torch.manual_seed(num_workers)
    assert epoch(1) == [drawn_for(1, first) for first in (0, 4, 8)]


def collated(samples):
    return draws()


def drawn_for(epoch, first):
    """What a collate function draws, by the seeds alone."""
    seeds = SampleSeeds(3, shared=False)
    seeds.start_epoch(epoch)
    seeds.start_batch(first, [])
    for generator in host_generators().values():
        generator.seed(seeds.of_collate(first))
    drawn = draws()
    seeds.end_batch()
    return drawn


def test_a_sample_that_comes_again_draws_other_numbers():
    """A rare class that is shown ten times an epoch is augmented in ten ways."""

    def sampled(num_workers):
        torch.manual_seed(0)
        sampler = WeightedRandomSampler([1.0, 1.0, 2.0], 30)
        return rows(DataLoader(Drawing(3), 4, sampler=sampler, num_workers=num_workers))

    found = sampled(0)

    assert len({tuple(row) for row in found}) == 30
    assert found == sampled(2)
    assert all(row in found for row in rows(DataLoader(Drawing(3), 4)))


def test_a_generator_made_of_torchs_seed_is_tied_to_the_sample():
    """For a data set that draws from a generator of its own; the page on resuming says so."""

    class Own(Drawing):
        def __getitem__(self, idx):
            return [idx, np.random.default_rng(torch.initial_seed()).random()]

    found = rows(DataLoader(Own(200), 50, num_workers=1))

    assert found == rows(DataLoader(Own(200), 3))
    assert len({row[1] for row in found}) == 200


def test_names_draw_by_name():
    """An index may be anything that a data set takes."""

    class Named(Drawing):
        def __getitem__(self, name):
            return [len(name), *draws()]

    found = rows(DataLoader(Named(), 2, sampler=["a", "bb", "ccc", "dddd"]))

    assert found == rows(DataLoader(Named(), 1, sampler=["dddd", "ccc", "bb", "a"]))
    assert len({row[1] for row in found}) == 4


KNOWN = {
    "tensors": TensorDataset(torch.arange(4)),
    "a list": [1, 2],
    "a tensor": torch.arange(4),
    "an array": np.arange(4),
    "a subset": Subset(TensorDataset(torch.arange(4)), [1, 2]),
    "a concatenation": ConcatDataset([[1], TensorDataset(torch.arange(4))]),
    "a stack": StackDataset([1], [2]),
    "a stack by name": StackDataset(a=[1], b=[2]),
}


@pytest.mark.parametrize("dataset", KNOWN.values(), ids=KNOWN)
def test_a_data_set_that_is_known_to_draw_nothing_stays_as_it_is(dataset):
    """It costs nothing then."""
    assert seeded(dataset, default_collate, None) == (dataset, default_collate)


def test_a_data_set_in_a_subset_is_seeded_for_each_sample():
    """Torch's subset reads batches at once, if only to read one after the other."""
    subset = Subset(Drawing(), range(12))

    assert rows(DataLoader(subset, 5)) == rows(DataLoader(Drawing(), 3))


def set_scale(worker):
    dataset = get_worker_info().dataset
    dataset.scale = dataset.num + worker


class Scaled(Drawing):
    def __getitem__(self, idx):
        return [idx, self.scale]


def test_a_worker_finds_the_data_sets_attributes():
    """`worker_init_fn` reads and sets them, through what seeds."""
    loader = DataLoader(Scaled(), 4, num_workers=1, worker_init_fn=set_scale)

    assert {row[1] for row in rows(loader)} == {12.0}


def test_a_seeded_data_set_can_be_sent_to_a_worker():
    """Where processes aren't forks, it is pickled."""
    seeds = SampleSeeds(3, shared=False)
    dataset, collate = pickle.loads(
        pickle.dumps(seeded(Drawing(), collated, seeds))  # the whole pair
    )

    assert isinstance(dataset, SeededDataset)
    assert (len(dataset), dataset.num, dataset.scale) == (12, 12, 1.0)
    assert collate(dataset.__getitems__([0])) == drawn_for(0, 0)
    with pytest.raises(AttributeError, match="missing"):
        dataset.missing


@pytest.mark.nightly
def test_workers_that_are_no_forks_draw_the_same(monkeypatch):
    """The epoch reaches them through memory that is shared."""
    # Their data set is this module's, which they import; pytest-xdist has no such path.
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    loader = DataLoader(Drawing(), 4, num_workers=1, multiprocessing_context="spawn")

    assert rows(loader, epoch=2) == rows(DataLoader(Drawing(), 3), epoch=2)


def test_a_loader_without_batches_is_seeded():
    """Each sample is a batch, for which it is seeded."""
    feed = Feed(DataLoader(Drawing(), batch_size=None), Processes(), sample_seed=3)
    feed.start_epoch(0)

    assert [feed.next() for _ in range(12)] == rows(DataLoader(Drawing(), 4))


class OwnGenerators(Dataset):
    """Draws from generators of its own, of every kind."""

    def __init__(self):
        self.torch = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.old_numpy = np.random.RandomState(1)

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        drawn = [self.python.random(), self.numpy.random(), self.old_numpy.random_sample()]
        return torch.cat([torch.rand(1, generator=self.torch).double(), torch.tensor(drawn)])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: Subset(one, range(8))])
def test_a_data_set_s_own_generators_are_tied_to_the_sample_too(wrap, num_workers):
    """Whoever draws from them gets the same sample in any order, in any worker."""

    def batches(**given):
        loader = DataLoader(wrap(OwnGenerators()), 4, num_workers=num_workers, **given)
        feed = Feed(loader, Processes(), sample_seed=0)
        feed.start_epoch(0)
        return torch.cat([feed.next() for _ in range(2)])

    forward = batches()

    assert torch.equal(forward, batches(sampler=list(range(7, -1, -1))).flip(0))
    assert len(forward.unique()) == forward.numel()


def test_an_order_drawn_from_the_data_set_s_own_generator_is_a_new_one_each_epoch():
    """Who has one generator for all gives it to the loader, too: it isn't left where a sample was."""
    dataset = OwnGenerators()
    loader = DataLoader(dataset, 4, shuffle=True, generator=dataset.torch)
    feed = Feed(loader, Processes(), sample_seed=0)
    orders = []
    for epoch in range(3):
        feed.start_epoch(epoch)
        while feed.has_next():
            feed.next()
        orders.append(dataset.torch.get_state())
        feed.end_epoch()

    plain = torch.Generator().manual_seed(1)
    for found in orders:
        torch.empty((), dtype=torch.int64).random_(
            generator=plain
        )  # what the workers are seeded from
        torch.randperm(8, generator=plain)

        assert torch.equal(found, plain.get_state())


class MadeLate(Drawing):
    """Makes its generator when it reads the first sample."""

    rng = None

    def __getitem__(self, idx):
        if self.rng is None:
            self.rng = np.random.default_rng(7)
        return [int(idx), self.rng.random()]


class MadeEachEpoch(Drawing):
    """Makes its generator when it is told the epoch; a helper object holds it."""

    def set_epoch(self, epoch):
        self.helper = SimpleNamespace(rng=np.random.default_rng(epoch))

    def __getitem__(self, idx):
        return [int(idx), self.helper.rng.random()]


class MadeForEachSample(Drawing):
    """Makes its generator of the index, again and again."""

    def __getitem__(self, idx):
        self.rng = random.Random(int(idx))
        return [int(idx), self.rng.random(), random.random()]


_generator = random.Random(0)


class UsesAGlobalVariable(Drawing):
    """Draws from a generator of its module."""

    def __getitem__(self, idx):
        return [int(idx), _generator.random()]


@pytest.mark.parametrize("kind", [MadeLate, MadeEachEpoch, MadeForEachSample, UsesAGlobalVariable])
def test_a_generator_is_tied_to_the_sample_whenever_it_is_made(kind):
    """In workers, too, whose copies nobody else sees."""
    alone = [rows(DataLoader(kind(), 3), epoch) for epoch in (0, 1)]

    assert [rows(DataLoader(kind(), 4, shuffle=True), epoch) for epoch in (0, 1)] == alone
    assert [rows(DataLoader(kind(), 3, num_workers=2), epoch) for epoch in (0, 1)] == alone
    assert alone[0] != alone[1]


class ToldItsEpoch(Drawing):
    """Knows the epoch, and nothing else."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, idx):
        return [int(idx), self.epoch]


def test_workers_that_stay_are_told_the_epoch():
    """Their copies of the data set were made in the first one."""
    loader = DataLoader(ToldItsEpoch(), 3, num_workers=2, persistent_workers=True)
    feed = Feed(loader, Processes(), sample_seed=0)
    epochs = []
    for epoch in range(4):
        feed.start_epoch(epoch)
        while feed.has_next():
            epochs += feed.next()[1].tolist()
        feed.end_epoch()

    assert epochs == [epoch for epoch in range(4) for _ in range(12)]


@pytest.mark.parametrize(
    "indices",
    [
        [0, 1, 63, 2**31, -1, -(2**63), 2**63 - 1],
        [5, 2**63, 7],  # beyond 64 bits
        [RepeatedIndex(3, 1), 3],
        [np.int64(3), torch.tensor(4), "a name", (1, 2)],
        [],
    ],
)
def test_seeds_of_a_batch_are_those_of_its_samples(indices):
    """A batch's seeds are computed together, which must not change them."""
    seeds = SampleSeeds(7, shared=False)
    seeds.start_epoch(3)

    assert seeds.of_samples(indices) == [seeds.of_sample(index) for index in indices]


def test_the_seed_of_a_sample_never_changes():
    """A run that was begun with another version resumes with the same draws."""
    seeds = SampleSeeds(0, shared=False)
    seeds.start_epoch(0)

    assert seeds.of_samples([0, 12345]) == [6889309334107338206, 11511086885632586063]
