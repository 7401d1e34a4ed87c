"""The position in the data of loaders of every kind, and what can't be gone on with."""

from __future__ import annotations

import mmap
import random

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop.data.combined import FirstBatches
from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.errors import TaskError

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
NUM_BATCHES, NUM_EPOCHS = 6, 3


def shared_counts(num):
    """Returns counters below 256 that workers share, and that no checkpoint has: `ctypes` would be restored."""
    return mmap.mmap(-1, num)


class Counting(Dataset):
    """Notes in shared memory what was read, by whomever; the count is no state of the data set."""

    def __init__(self, num=24):
        self.read = shared_counts(num)

    def __len__(self):
        return len(self.read)

    def __getitem__(self, idx):
        self.read[idx] += 1
        return idx


class Stream(IterableDataset):
    """Six batches of four, in another order each epoch, drawn from Python."""

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, num = (0, 1) if info is None else (info.id, info.num_workers)
        start = random.randrange(100)
        for idx in range(worker, 24, num):
            yield (start + idx, worker)


class StatefulStream(IterableDataset):
    """A stream that says where it is, and notes what was read."""

    def __init__(self):
        self.at = 0
        self.turn = 0
        self.read = shared_counts(8)  # one for each worker: two that count in one place lose counts

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        num_workers = 1 if info is None else info.num_workers
        worker = 0 if info is None else info.id
        while self.at < 24 // num_workers:
            self.at += 1
            self.read[worker] += 1
            yield self.turn * 100 + self.at
        self.at, self.turn = 0, self.turn + 1

    def state_dict(self):
        return {"at": self.at, "turn": self.turn}

    def load_state_dict(self, state):
        self.at, self.turn = state["at"], state["turn"]


class ToldItsEpoch(IterableDataset):
    """As streams of `datasets`: a state counts in its epoch alone, and whoever iterates says which it is."""

    def __init__(self):
        self.epoch, self.at = 0, 0
        self.loaded = {}
        self.read = shared_counts(1)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.at = self.loaded["at"] if self.loaded.get("epoch") == self.epoch else 0
        while self.at < 24:
            self.at += 1
            self.read[0] += 1
            yield self.epoch * 100 + self.at

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.loaded = state


class Plain:
    """An iterable that is not a loader."""

    def __iter__(self):
        return iter([[random.random()] for _ in range(NUM_BATCHES)])


class PlainStateful:
    """A loader of its own that says where it is; at the end of an epoch, at its end."""

    def __init__(self, num_batches=NUM_BATCHES):
        self.num_batches = num_batches
        self.load_state_dict({"at": 0})

    def __iter__(self):
        start, self.start = self.start, 0
        for self.at in range(start + 1, self.num_batches + 1):
            yield [self.at]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


class Translating(DataLoader):
    """A data loader of a user's own, whose batches are made in `__iter__`."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch * 2


def streaming(num_workers):
    return lambda: DataLoader(Stream(), 4, num_workers=num_workers)


def stateful(dataset, **given):
    return lambda: StatefulDataLoader(dataset(), 4, **given)


LOADERS = {
    "list": lambda: [[idx] for idx in range(NUM_BATCHES)],
    "stream": streaming(0),
    "stream, workers": streaming(2),
    "iterable": Plain,
    "own class": lambda: Translating(Counting(), 4, shuffle=True),
    "own generator": lambda: DataLoader(
        Counting(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "limited": lambda: FirstBatches(DataLoader(Counting(40), 4, shuffle=True), 6),
    "limited stream": lambda: FirstBatches(DataLoader(Stream(), 3), 6),
    "stateful": stateful(Counting, shuffle=True),
    "stateful, workers": stateful(Counting, shuffle=True, num_workers=2),
    "stateful stream": stateful(StatefulStream),
    "stateful stream, worker": stateful(StatefulStream, num_workers=1),
    "stateful stream, workers": stateful(StatefulStream, num_workers=2, persistent_workers=True),
    "told its epoch": stateful(ToldItsEpoch),
    "told its epoch, worker": stateful(ToldItsEpoch, num_workers=1),
    "stateful iterable": PlainStateful,
    "stateful iterable, limited": lambda: FirstBatches(PlainStateful(9), NUM_BATCHES),
}
# These can't begin at a later batch.
AGAIN = ("stream", "stream, workers", "iterable", "limited stream")


def feed_of(dataloader):
    return Feed(dataloader, Processes(), sample_seed=0)


def epochs(feed, epoch=0, stop=None, leave_at=None):
    """Trains until the end, or until `stop` batches; gives them by epoch, and the epoch."""
    seen = []
    while epoch < NUM_EPOCHS and len(seen) != stop:
        if not feed.under_way:
            feed.start_epoch(epoch)
        has_left = False
        while not has_left and len(seen) != stop and feed.has_next():
            seen.append((epoch, str(feed.next())))
            has_left = len(seen) == leave_at
        if has_left or len(seen) != stop:
            feed.end_epoch()
            epoch += 1
    return seen, epoch


def stopped(make, stop, leave_at=None, shift=0, peeks=False):
    """Trains with a stop after so many batches; gives what was seen by both runs.

    Args:
        peeks: whether somebody has looked if the epoch was over before the position is kept.
    """
    torch.manual_seed(0), random.seed(0)
    feed = feed_of(make())
    seen, epoch = epochs(feed, stop=stop, leave_at=leave_at)
    if peeks and feed.under_way:
        feed.has_ended()
    state, standing = feed.state_dict(), (torch.get_rng_state(), random.getstate())
    torch.manual_seed(9), random.seed(9)
    resumed = feed_of(make())
    resumed.load_state_dict({**state, "num_taken": state["num_taken"] + shift})
    torch.set_rng_state(standing[0]), random.setstate(standing[1])
    return seen + epochs(resumed, epoch)[0]


@pytest.mark.sampled(119)
@pytest.mark.filterwarnings("ignore:.* batches were read again")
@pytest.mark.parametrize(
    ("stop", "peeks"),
    [(0, False), (1, False), (4, True), (6, False), (6, True), (7, True), (18, False)],
)
@pytest.mark.parametrize("kind", LOADERS)
def test_every_kind_goes_on_with_what_comes_next(kind, stop, peeks):
    """At the start, in the middle, at the last batch of an epoch, past the end."""
    torch.manual_seed(0), random.seed(0)
    expected, _ = epochs(feed_of(LOADERS[kind]()))

    seen = stopped(LOADERS[kind], stop, peeks=peeks)

    assert seen == expected
    assert len(seen) == NUM_EPOCHS * NUM_BATCHES


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", sorted(LOADERS.keys() - {"stateful stream"}))
def test_an_epoch_that_was_left_is_not_gone_on_with(kind):
    """A plugin that answered should_end_epoch wants the next one; in a run that goes on, too.

    `stateful stream` goes on by itself where it was left. Resumed, it lacks the batch that had to be read
    so that others begin their next epoch.
    """
    torch.manual_seed(0), random.seed(0)
    expected, _ = epochs(feed_of(LOADERS[kind]()), leave_at=4)

    assert stopped(LOADERS[kind], stop=4, leave_at=4) == expected


@pytest.mark.parametrize("stop", [NUM_BATCHES - 2, NUM_BATCHES])
def test_a_limited_epoch_of_a_loader_with_a_state_ends(stop):
    """Stopped at its last batch, too: what the loader has left isn't part of the next epoch."""
    make = LOADERS["stateful iterable, limited"]

    assert stopped(make, stop) == epochs(feed_of(make()))[0]


@pytest.mark.parametrize(
    "kind", [one for one in LOADERS if one not in (*AGAIN, "list") and "stateful it" not in one]
)
def test_nothing_is_read_again(kind):
    """Reading may be what takes the time: what was trained on isn't touched."""
    read = []

    def make():
        loader = LOADERS[kind]()
        inner = loader.part.dataloader if isinstance(loader, FirstBatches) else loader
        read.append(inner.dataset.read)
        return loader

    torch.manual_seed(0), random.seed(0)
    seen = stopped(make, stop=4)
    resumed = seen[4:NUM_BATCHES] + seen[NUM_BATCHES:]

    # A worker of a stream reads on from what it has given; torchdata's reads at most a batch more.
    # A sample of each worker is read twice more, to see whether it depends on seeds.
    slack = 4
    assert sum(read[-1][:]) <= 4 * len(resumed) + slack
    assert sum(read[-1][:]) >= 4 * len(resumed)


@pytest.mark.parametrize("kind", AGAIN)
def test_what_is_read_again_is_said(kind):
    """It may take long, and nobody should wonder why."""
    with pytest.warns(UserWarning, match=r"^4 batches were read again to resume in mid-epoch"):
        stopped(LOADERS[kind], stop=4)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_position_that_was_loaded_is_saved_again_without_a_draw(kind):
    """A run that was killed at its very end goes on to save, before it asks for a batch."""
    feed = feed_of(LOADERS[kind]())
    epochs(feed, stop=4)
    if feed.under_way:
        feed.has_ended()
    resumed = feed_of(LOADERS[kind]())
    resumed.load_state_dict(feed.state_dict())
    before = torch.get_rng_state()

    resumed.state_dict()

    assert torch.equal(torch.get_rng_state(), before)


def test_a_position_shifted_by_one_is_found_out():
    """Control: the comparisons above see a batch that is left out."""
    torch.manual_seed(0), random.seed(0)
    expected, _ = epochs(feed_of(LOADERS["own class"]()))

    assert stopped(LOADERS["own class"], stop=4, shift=1) != expected


CHANGES = {
    "batch size": (
        lambda: DataLoader(Counting(), 8),
        r"with 4 samples a step, and a step has 8 samples now[\s\S]*batch_size to 4",
    ),
    "samples": (lambda: DataLoader(Counting(28), 4), "over 24 samples, .* has 28 now"),
    "batches": (
        lambda: DataLoader(Counting(), batch_sampler=[[idx] for idx in range(24)]),
        "with 4 samples a step, and a step has a batch sampler's batch now",
    ),
    "kind": (lambda: [[1]] * 6, "another kind of train data loader: map, now list"),
}


@pytest.mark.parametrize(("make", "words"), CHANGES.values(), ids=CHANGES)
def test_other_data_in_mid_epoch_is_refused(make, words):
    """What was trained on can't be told from what wasn't."""
    feed = feed_of(DataLoader(Counting(), 4))
    epochs(feed, stop=3)

    with pytest.raises(TaskError, match=words):
        feed_of(make()).load_state_dict(feed.state_dict())


def test_a_list_of_another_length_is_refused():
    """Its batches have no size that could be compared."""
    feed = feed_of([[1]] * 6)
    epochs(feed, stop=3)

    with pytest.raises(TaskError, match="an epoch of 6 batches with 1 ranks; now it has 5"):
        feed_of([[1]] * 5).load_state_dict(feed.state_dict())


def test_between_epochs_data_may_change():
    """Nothing of it was trained on in the epoch to come."""
    feed = feed_of(DataLoader(Counting(), 4))
    feed.start_epoch(0)
    feed.end_epoch()

    resumed = feed_of(DataLoader(Counting(28), 7))
    resumed.load_state_dict(feed.state_dict())

    assert resumed.used
    assert not resumed.under_way


def test_batches_that_come_out_of_order_are_warned_of():
    """Which ones were trained on depends on who was faster."""

    def make():
        return DataLoader(Counting(), 4, num_workers=2, in_order=False)

    feed = feed_of(make())
    epochs(feed, stop=3)

    with pytest.warns(UserWarning, match="in_order=False: the batches that were trained on depend"):
        feed_of(make()).load_state_dict(feed.state_dict())


def test_the_users_loader_stays_as_it_is():
    """Its attributes are the user's; what is gone through is a copy."""
    loader = DataLoader(Counting(), 4, shuffle=True)
    parts = loader.dataset, loader.sampler, loader.batch_sampler, loader.collate_fn

    epochs(feed_of(loader), stop=3)

    now = loader.dataset, loader.sampler, loader.batch_sampler, loader.collate_fn
    assert all(one is other for one, other in zip(parts, now, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_draws_nothing_from_the_global_generators(num_workers):
    """They are put where they stood by whoever loads, before or after."""
    feed = feed_of(DataLoader(Counting(), 4, shuffle=True, num_workers=num_workers))
    epochs(feed, stop=3)
    resumed = feed_of(DataLoader(Counting(), 4, shuffle=True, num_workers=num_workers))
    before = torch.get_rng_state(), random.getstate()

    resumed.load_state_dict(feed.state_dict())
    epochs(resumed, stop=2)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
