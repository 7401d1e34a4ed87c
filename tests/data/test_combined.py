"""Data loaders made of others: their batches, and where a run that was stopped goes on in them."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop.data import cycled, zipped
from eventloop.data.feed import Feed
from eventloop.data.loaders import loader_of
from eventloop.data.positions import check_position
from eventloop.distributed.processes import Processes
from eventloop.errors import TaskError

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11
    pytest.mark.filterwarnings("ignore:.* batches were read again"),
]
NUM_EPOCHS = 4


class Noisy(Dataset):
    """Samples with noise, drawn where they are read."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, idx):
        return idx + 0.1 * torch.rand(1).item()


class Stream(IterableDataset):
    """Samples from a start that is drawn once an epoch."""

    def __iter__(self):
        start = random.randrange(100)
        return iter(range(start, start + 20))


class Ordered(IterableDataset):
    """Samples in an order of each turn's own; it knows where it is."""

    def __init__(self):
        self.turn = self.at = 0

    def __iter__(self):
        while self.at < 12:
            self.at += 1
            yield 100 * self.turn + self.at
        self.turn, self.at = self.turn + 1, 0

    def state_dict(self):
        return {"turn": self.turn, "at": self.at}

    def load_state_dict(self, state):
        self.turn, self.at = state["turn"], state["at"]


class Pairs:
    """A stranger's wrapper: it holds loaders, each with a generator of its own."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=False)


class Nested:
    """A stranger's wrapper with generators and samplers deeper inside."""

    def __init__(self):
        self.rng = random.Random(3)
        self.parts = {"a": [DataLoader(range(20), 4, sampler=Turning(20))]}

    def __iter__(self):
        for batch in self.parts["a"][0]:
            yield batch, self.rng.random()


class Turning(Sampler):
    """Counts its turns, and draws from a generator of its own."""

    def __init__(self, num):
        self.num, self.turns, self.rng = num, 0, random.Random(5)

    def __len__(self):
        return self.num

    def __iter__(self):
        self.turns += 1
        order = self.rng.sample(range(self.num), self.num)
        return iter(order[:: (-1) ** self.turns])


def own(num, batch_size=4, seed=5, **given):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Noisy(num), batch_size, shuffle=True, generator=generator, **given)


def silent(num, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(range(num), 4, shuffle=True, generator=generator)


def shuffled(num, batch_size=4, **given):
    return DataLoader(Noisy(num), batch_size, shuffle=True, **given)


LOADERS = {
    "zipped": lambda: zipped(shuffled(20), shuffled(20)),
    "zipped, own generators": lambda: zipped(own(20), own(22, seed=7)),
    "zipped, one longer": lambda: zipped(own(32), own(18, seed=7)),
    "by name": lambda: zipped(labelled=shuffled(18), unlabelled=shuffled(40, 8)),
    "cycled": lambda: zipped(shuffled(20), cycled(shuffled(12))),
    "cycled, own generators": lambda: zipped(own(20), cycled(own(12, seed=7))),
    "cycled, longer": lambda: zipped(shuffled(20), cycled(shuffled(70))),
    "cycled first": lambda: zipped(cycled(own(12)), DataLoader(Stream(), 4)),
    "cycled alone": lambda: zipped(cycled(zipped(own(12), [1, 2, 3])), list(range(5))),
    "cycled list": lambda: zipped(shuffled(20), cycled([1, 2, 3])),
    "cycled stream": lambda: zipped(shuffled(20), cycled(DataLoader(Stream(), 6))),
    "cycled workers": lambda: zipped(shuffled(20), cycled(shuffled(12, num_workers=1))),
    "lasting workers": lambda: zipped(
        shuffled(20), cycled(shuffled(12, num_workers=1, persistent_workers=True))
    ),
    "cycled stateful": lambda: zipped(
        DataLoader(Stream(), 4), cycled(StatefulDataLoader(Ordered(), 4))
    ),
    "a stranger's": lambda: Pairs(silent(20), silent(22, seed=7)),
    "a stranger's, nested": Nested,
}


def feed_of(dataloader):
    return Feed(dataloader, Processes(), sample_seed=0)


def train(feed, epoch=0, stop=None, leave_at=None):
    """Trains to the end, or for `stop` batches; returns what was seen, with training's draws."""
    seen = []
    while epoch < NUM_EPOCHS and len(seen) != stop:
        if not feed.under_way:
            feed.start_epoch(epoch)
        has_left = False
        while not has_left and len(seen) != stop and feed.has_next():
            seen.append((epoch, str(feed.next()), torch.rand(1).item(), random.random()))
            has_left = len(seen) == leave_at
        if has_left or len(seen) != stop:
            feed.end_epoch()
            epoch += 1
    return seen, epoch


def uninterrupted(make, leave_at=None):
    torch.manual_seed(0), random.seed(0)
    return train(feed_of(make()), leave_at=leave_at)[0]


def stopped(make, stop, peeks=False, leave_at=None, spoil=lambda state: state):
    """Trains with a stop after so many batches, and goes on with loaders that are made anew."""
    torch.manual_seed(0), random.seed(0)
    feed = feed_of(make())
    seen, epoch = train(feed, stop=stop, leave_at=leave_at)
    if peeks and feed.under_way:
        feed.has_ended()
    state, standing = feed.state_dict(), (torch.get_rng_state(), random.getstate())
    check_position(state["position"], "position")
    torch.manual_seed(9), random.seed(9)
    resumed = feed_of(make())
    resumed.load_state_dict(spoil(state))
    torch.set_rng_state(standing[0]), random.setstate(standing[1])
    return seen + train(resumed, epoch)[0]


@pytest.mark.sampled(135)
@pytest.mark.parametrize(
    ("stop", "peeks"),
    [(0, False), (1, False), (3, True), (4, False), (5, False), (5, True), (8, False), (11, True)],
)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_combined_loader_goes_on_with_what_comes_next(kind, stop, peeks):
    """Wherever it was stopped: in mid-turn of what is cycled, at its end, and between epochs."""
    assert stopped(LOADERS[kind], stop, peeks) == uninterrupted(LOADERS[kind])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", sorted(LOADERS.keys() - {"cycled stateful"}))
def test_an_epoch_that_was_left_is_not_gone_on_with(kind):
    """What is cycled goes on after the last batch that it gave."""
    expected = uninterrupted(LOADERS[kind], leave_at=3)

    assert stopped(LOADERS[kind], stop=3, leave_at=3) == expected


def test_the_comparison_sees_a_turn_that_is_lost():
    """Control: begun anew, what is cycled gives other batches."""

    def forget(state):
        position = state["position"]
        position["parts"]["1"] = {**position["parts"]["1"], "num_in_pass": 0}
        return state

    kind = LOADERS["cycled, longer"]

    assert stopped(kind, 3, spoil=forget) != uninterrupted(kind)


def test_batches_come_side_by_side_until_the_shortest_ends():
    """As a tuple, or by name; a mapping of loaders is as good as keywords."""
    letters, numbers = ["a", "b", "c"], [1, 2]

    assert list(zipped(letters, numbers)) == [("a", 1), ("b", 2)]
    assert list(zipped(x=letters, y=numbers)) == [{"x": "a", "y": 1}, {"x": "b", "y": 2}]
    assert list(zipped({"x": letters, "y": numbers})) == list(zipped(x=letters, y=numbers))


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (lambda: zipped([1, 2, 3], [1, 2]), 2),
        (lambda: zipped([1, 2, 3], cycled([1, 2])), 3),
        (lambda: zipped([1, 2, 3], DataLoader(Stream(), 4)), None),
        (lambda: zipped(cycled([1]), cycled([2])), None),
        (lambda: cycled([1]), None),
    ],
)
def test_the_length_is_that_of_the_shortest_that_ends(make, length):
    """Where each that ends has one."""
    assert loader_of(make()).num_batches == length
    assert feed_of(make()).num_batches == length


def test_what_is_cycled_goes_on_in_the_next_epoch():
    """All of its batches are seen before any is seen again; nothing is lost between two epochs."""
    for shorter in ([0, 0, 0], DataLoader(Stream(), 8)):
        feed = feed_of(zipped(shorter, cycled(["a", "b", "c", "d"])))

        seen = "".join(batch[-3] for _, batch, *_ in train(feed)[0])

        assert seen == "abcdabcdabcd"


def test_outside_of_a_run_what_is_cycled_begins_anew():
    """Evaluation goes over the same data each time."""
    both = zipped([1, 2, 3], cycled(["a", "b"]))

    assert list(both) == list(both) == [(1, "a"), (2, "b"), (3, "a")]


def test_two_parts_over_one_data_set_draw_their_own():
    """Two views of an image would be the same one."""
    feed = feed_of(zipped(DataLoader(Noisy(8), 4), DataLoader(Noisy(8), 4)))
    feed.start_epoch(0)

    one, other = feed.next()

    assert not torch.equal(one, other)
    assert torch.equal(one.int(), other.int())


def test_what_cannot_be_combined_is_refused():
    """With the line to write, before a run begins."""
    with pytest.raises(TypeError, match=r"zipped takes data loaders.*zipped\(labelled=a"):
        zipped()
    with pytest.raises(TypeError, match="zipped: '1' is an int, not a data loader"):
        zipped([1], 3)
    with pytest.raises(TypeError, match="cycled is a generator, which is used up after one pass"):
        cycled(one for one in [1])
    with pytest.raises(TaskError, match="cycled: a list yielded no batch"):
        next(iter(cycled([])))
    with pytest.raises(TaskError, match="cycled: a list yielded no batch"):
        train(feed_of(zipped([1], cycled([]))))


def test_another_kind_is_named():
    """A run that was begun with two loaders doesn't go on with one."""
    state = feed_of(zipped(own(8), cycled([1]))).state_dict()

    with pytest.raises(TaskError, match="map and cycled list, now map"):
        feed_of(own(8)).load_state_dict(state)


SMALL = [(torch.ones(2), torch.ones(2))] * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: cycled(DataLoader(SMALL, 8, drop_last=True)),
        lambda: zipped(DataLoader(SMALL, 2), cycled(DataLoader(SMALL, 8, drop_last=True))),
        lambda: cycled(zipped(DataLoader(SMALL, 2), DataLoader(SMALL, 8, drop_last=True))),
        lambda: cycled(DataLoader(SMALL, 8, drop_last=True, sampler=[0, 1, 2, 3, 4])),
    ],
)
def test_what_is_cycled_and_emptied_by_drop_last_says_so(make):
    """The loader has samples, and isn't used up."""
    with pytest.raises(TaskError) as outside:
        next(iter(make()))
    with pytest.raises(TaskError) as in_a_run:
        train(feed_of(make()), stop=1)

    for caught in (outside, in_a_run):
        assert caught.value.fix == (
            "drop_last=True drops a batch of fewer than 8 samples, and there are 5: use a smaller "
            "batch_size, or leave drop_last out"
        )


@pytest.mark.parametrize(
    "loader",
    [[], DataLoader(SMALL, 8, sampler=[]), DataLoader(SMALL, 8, sampler=[], drop_last=True)],
)
def test_what_is_empty_for_another_reason_is_not_blamed_on_drop_last(loader):
    """Of an iterator that is used up, and of a sampler without samples."""
    with pytest.raises(TaskError) as caught:
        next(iter(cycled(loader)))

    assert "drop_last" not in caught.value.fix


@pytest.mark.parametrize("by_name", [True, False])
def test_zipped_loaders_within_others_count_by_their_first(by_name):
    """Their parts differ in size on purpose, however they are nested."""
    large, small = ([(torch.zeros(size, 3), torch.zeros(size))] for size in (4, 2))
    loader = zipped(large=large, small=small) if by_name else zipped(large, small)

    for nested in (cycled(loader), zipped(loader, small), cycled(zipped(loader, cycled(small)))):
        assert nested.num_samples(next(iter(nested))) == 4
    pieces = cycled(loader).split(next(iter(loader)), 2)
    assert len(pieces) == 2
