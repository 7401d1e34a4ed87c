"""Only the generators that a data set or a collate function draws from are seeded for it."""

from __future__ import annotations

import random
import warnings

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
)

from eventloop.data.draws import Draws, may_draw
from eventloop.data.feed import Feed
from eventloop.data.sample_seeds import SampleSeeds
from eventloop.distributed.processes import Processes
from eventloop.rng import KeptGenerators, host_generators, kept_generators


def forked():
    with torch.random.fork_rng():
        return float(torch.rand(()))


DRAWS = {
    "python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": lambda: float(np.random.rand()),
    "normal": lambda: float(np.random.normal()),
    "torch": lambda: float(torch.rand(())),
    "seed": lambda: float(torch.initial_seed() % 100_003),
    "fork": forked,
}


class Drawing(Dataset):
    """Samples of an index and a number that is drawn from `first` on."""

    def __init__(self, kind, first=0):
        self.kind, self.first = kind, first

    def __len__(self):
        return 40

    def __getitem__(self, idx):
        return [float(idx), DRAWS[self.kind]() if idx >= self.first else 0.0]


def epoch(dataset, collate_fn=torch.tensor, *, epoch=1, num_workers=0, seed=3):
    """Returns an epoch's batches, in an order of its own."""
    torch.manual_seed(1)
    loader = DataLoader(dataset, 6, shuffle=True, num_workers=num_workers, collate_fn=collate_fn)
    feed = Feed(loader, Processes(), sample_seed=seed)
    feed.start_epoch(epoch)
    found = []
    while feed.has_next():
        found.append(feed.next())
    return found


def drawn_alone(kind, idx):
    """Returns what the sample of an index draws where all generators are seeded for it alone."""
    seeds = SampleSeeds(3, shared=False)
    seeds.start_epoch(1)
    kept = seeds.start_batch(idx, [])
    for generator in host_generators().values():
        generator.seed(seeds.of_sample(idx))
    drawn = DRAWS[kind]()
    kept.put_back()
    return drawn


@pytest.mark.sampled(12)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first", [0, 23, 39])
@pytest.mark.parametrize("kind", DRAWS)
def test_draws_are_those_of_the_sample_alone_whenever_they_begin(kind, first, num_workers):
    np.random.normal(), random.gauss(0, 1)  # a second number of each waits for the next call

    batches = torch.cat(epoch(Drawing(kind, first), num_workers=num_workers)).double()

    expected = {idx: drawn_alone(kind, idx) if idx >= first else 0.0 for idx in range(40)}
    assert dict(batches.tolist()) == pytest.approx(expected, rel=1e-6)


def test_the_numbers_are_those_of_eventloop_0_1():
    """A run of before goes on with them; seeds are part of what a release promises."""

    class Three(Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, idx):
            return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    feed = Feed(DataLoader(Three(), 2, collate_fn=list), Processes(), sample_seed=3)
    feed.start_epoch(1)

    assert feed.next() == [
        [0.05335813578179904, 0.313615670381723, 0.2856106758117676],
        [0.9586250836231998, 0.9655390144855687, 0.1779879331588745],
    ]


def collated_late(samples):
    """Draws from three generators, for batches that hold the sample 17."""
    is_late = any(idx == 17 for idx, _ in samples)
    return [float(samples[0][0]), *(DRAWS[one]() if is_late else 0.0 for one in DRAWS)]


@pytest.mark.parametrize("kind", ["python", "torch"])
def test_a_collate_function_that_draws_late_is_called_again_seeded(kind):
    (late,) = (one for one in epoch(Drawing(kind), collated_late) if any(one[1:]))

    again = epoch(Drawing(kind), collated_late, num_workers=2)

    assert late in again


@pytest.mark.parametrize("first", [0, 23])
@pytest.mark.parametrize("kind", DRAWS)
def test_the_training_draws_as_if_samples_did_not(kind, first):
    def draws_between(dataset):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        feed = Feed(DataLoader(dataset, 6), Processes(), sample_seed=3)
        feed.start_epoch(0)
        found = []
        while feed.has_next():
            feed.next()
            found.append([draw() for draw in DRAWS.values()])
        return found

    assert draws_between(Drawing(kind, first)) == draws_between(Drawing(kind, 40))


def test_what_draws_nothing_is_not_seeded(monkeypatch):
    """But for the first batch and its collate function, and a sample that is read twice more."""
    seeded = []
    hosts = host_generators()
    for name in hosts:
        counted = hosts[name]._replace(seed=lambda _, name=name: seeded.append(name))
        monkeypatch.setitem(hosts, name, counted)

    epoch(Drawing("python", 40))

    assert len(seeded) == (6 + 1 + 2) * len(hosts)


def test_only_the_generator_that_is_drawn_from_is_seeded(monkeypatch):
    seeded = []
    hosts = host_generators()
    for name in hosts:
        own = hosts[name].seed
        spy = lambda number, name=name, own=own: (seeded.append(name), own(number))  # noqa: E731
        monkeypatch.setitem(hosts, name, hosts[name]._replace(seed=spy))

    epoch(Drawing("torch"))

    assert {name: seeded.count(name) for name in hosts} == {"python": 9, "numpy": 9, "torch": 43}


def test_a_data_set_that_draws_on_one_of_two_reads_is_named():
    """It makes something random when it is first asked for it; no seed was set then."""

    class Cached(Drawing):
        noise = None

        def __getitem__(self, idx):
            if idx == 17 and self.noise is None:
                self.noise = random.random()
            return [float(idx), self.noise or 0.0]

    with pytest.warns(UserWarning, match="the data set Cached drew from the generator of python"):
        epoch(Cached("python"))


def test_a_read_that_fails_where_it_draws_late_fails_as_it_would_seeded():
    class Failing(Drawing):
        def __getitem__(self, idx):
            if idx == 17:
                raise OSError(f"unreadable: {random.random()}")
            return [float(idx), 0.0]

    def message():
        random.seed()
        with pytest.raises(OSError, match="unreadable") as raised:
            epoch(Failing("python"))
        return str(raised.value)

    assert message() == message()


def test_torchs_generator_is_its_own_again_after_a_read_that_fails():
    def read(what, seed):
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        Draws("it").run(read, None, KeptGenerators())

    assert torch.random.default_generator is torch.default_generator


def test_kept_generators_are_put_back_from_any_kind_of_numpys():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        kept = KeptGenerators()
        drawn = np.random.rand()
        assert kept.moved() == {"numpy"}
        kept.put_back()
        assert np.random.rand() == drawn
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("draw", [*DRAWS.values()][:5])
def test_a_move_is_seen_and_put_back(draw):
    """The second number of a gaussian is one, too: only the flag changes as it is drawn."""
    for _ in range(3):
        kept = KeptGenerators()
        assert kept.moved() == set()
        drawn = draw()
        assert len(kept.moved()) == 1
        kept.put_back()
        assert kept.moved() == set()
        assert draw() == drawn


def test_no_warning_where_draws_begin_late():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(Drawing("numpy", 39))


class OwnTensors(TensorDataset):
    def __getitem__(self, idx):
        return [*super().__getitem__(idx), random.random()]


DRAWING = {
    "a user's": Drawing("python"),
    "a user's tensors": OwnTensors(torch.arange(4)),
    "a subset": Subset(Drawing("python"), [1, 2]),
    "a concatenation": ConcatDataset([[1], Drawing("python")]),
    "a stack": StackDataset(Drawing("python"), range(40)),
}


@pytest.mark.parametrize("dataset", DRAWING.values(), ids=DRAWING)
def test_what_a_user_wrote_may_draw(dataset):
    """That one sample drew nothing says nothing of the next."""
    assert may_draw(dataset)


class ReadsSeeds(Drawing):
    """Makes a generator of a seed or a state that reading doesn't move."""

    def __init__(self, kind, *, opens_late=False):
        super().__init__(kind)
        self.file = None if opens_late else "open"

    def __getitem__(self, idx):
        self.file = self.file or "open"
        seeds = {
            "torch": torch.default_generator.initial_seed(),
            "numpy": int(np.random.get_state()[1][0]),
            "python": hash(random.getstate()),
        }
        return [float(idx), random.Random(seeds[self.kind]).random()]


@pytest.mark.parametrize("opens_late", [False, True])
@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_a_seed_that_is_read_and_not_drawn_from_is_tied_to_the_sample(kind, opens_late):
    """Nothing moves: two reads with other seeds show it."""
    expected = torch.cat(epoch(ReadsSeeds(kind, opens_late=opens_late)))

    with kept_generators():
        torch.manual_seed(11), random.seed(11), np.random.seed(11)
        batches = epoch(ReadsSeeds(kind, opens_late=opens_late), num_workers=2)

    assert torch.equal(torch.cat(batches), expected)
