"""The position in the data of several ranks, and of a number of ranks that changes."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop.data import cycled, zipped
from eventloop.data.feed import Feed
from eventloop.errors import TaskError
from eventloop.rng import kept_generators
from eventloop_testing import isolated_trainer, run_ranks, tiny_task

GLOBAL_BATCH, NUM_EPOCHS = 4, 3


class Drawing(Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, idx):
        return idx, random.random()


class Turning(Sampler):
    """Begins elsewhere in each turn, and counts them."""

    def __init__(self, num):
        self.num, self.turn = num, 0

    def __len__(self):
        return self.num

    def __iter__(self):
        self.turn += 1
        return iter(torch.randperm(self.num).roll(self.turn).tolist())


LOADERS = {
    "shuffled": lambda size: DataLoader(Drawing(26), size, shuffle=True),
    "odd": lambda size: DataLoader(Drawing(27), size, shuffle=True),
    "generator": lambda size: DataLoader(
        Drawing(26), size, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "in order": lambda size: DataLoader(Drawing(27), size, drop_last=True),
    "weighted": lambda size: DataLoader(
        Drawing(26), size, sampler=WeightedRandomSampler(torch.arange(1.0, 27), 26)
    ),
    "own sampler": lambda size: DataLoader(Drawing(26), size, sampler=Turning(26)),
}


COMBINED = {
    "zipped": lambda size: zipped(
        DataLoader(Drawing(26), size, shuffle=True), DataLoader(Drawing(26), size, shuffle=True)
    ),
    "cycled": lambda size: zipped(
        DataLoader(Drawing(26), size, shuffle=True),
        cycled(DataLoader(Drawing(20), 2 * size, shuffle=True)),
    ),
}


def samples_of(batch, part=0):
    """Yields each sample of a batch with its draw, and the number of the loader that it is of."""
    first, second = batch
    if isinstance(first, torch.Tensor):
        yield from ((part, *one) for one in zip(first.tolist(), second.tolist(), strict=True))
    else:
        yield from (one for part, pair in enumerate(batch) for one in samples_of(pair, part))


@pytest.fixture
def train(tmp_path):
    """Trains up to a batch from a checkpoint; gives samples a step, with draws, and a checkpoint."""
    numbers = itertools.count()

    def train(make, stop, saved=None, world_size=1, uneven="pad", global_batch=GLOBAL_BATCH):
        task = tiny_task(train_dataloader=lambda: make(global_batch // world_size))
        folder = tmp_path / str(next(numbers))
        with isolated_trainer(folder, task, uneven=uneven) as trainer:
            feed: Feed = trainer._loop.feeds.current
            epoch = 0
            if saved is not None:
                states, generators, epoch = saved
                feed.load_state_dict(states[min(trainer.state.rank, len(states) - 1)])
                torch.set_rng_state(generators)
            seen = []
            while epoch < NUM_EPOCHS and len(seen) < stop:
                if not feed.under_way:
                    feed.start_epoch(epoch)
                while len(seen) < stop and feed.has_next():
                    seen.append(list(samples_of(feed.next())))
                    torch.rand(3)
                if len(seen) < stop:
                    feed.end_epoch()
                    epoch += 1
            states = trainer.state.all_gather(feed.state_dict())
            mine = trainer.state.all_gather(seen)
            steps = [sorted(itertools.chain(*parts)) for parts in zip(*mine, strict=True)]
            return steps, (states, torch.get_rng_state(), epoch)

    def in_ranks(make, stop=10**6, saved=None, world_size=1, **given):
        if world_size == 1:
            with kept_generators():
                return train(make, stop, saved, **given)
        results = run_ranks(train, make, stop, saved, world_size, world_size=world_size, **given)
        return results[0]

    return in_ranks


@pytest.mark.sampled(25)
@pytest.mark.parametrize(
    ("kind", "uneven"), [*((kind, "pad") for kind in LOADERS | COMBINED), ("odd", "drop")]
)
def test_two_ranks_go_on_as_one_process_and_as_two(train, kind, uneven):
    """The same samples a step, with the same draws, also in the epochs to come."""
    make = (LOADERS | COMBINED)[kind]
    expected, _ = train(make, world_size=2, uneven=uneven)

    seen, saved = train(make, 3, world_size=2, uneven=uneven)
    for stop, world_size in [(2, 1), (4, 2), (100, 1)]:
        more, saved = train(make, stop, saved, world_size=world_size, uneven=uneven)
        seen += more

    assert seen == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", LOADERS)
def test_one_process_goes_on_as_two_ranks(train, kind):
    """The same samples a step for the rest of the epoch; then they draw the order of ranks."""
    make = LOADERS[kind]
    num_batches = 6 if kind == "in order" else 7
    expected, _ = train(make)

    seen, saved = train(make, 2)
    for stop, world_size in [(1, 2), (1, 1), (100, 2)]:
        more, saved = train(make, stop, saved, world_size=world_size)
        seen += more

    assert seen[: num_batches - 1] == expected[: num_batches - 1]
    assert set(seen[num_batches - 1]) >= set(expected[num_batches - 1])  # or one more, to be even
    assert len(seen) == num_batches + 2 * 7


def test_ranks_share_out_each_part_and_draw_its_own_order(train):
    """Every sample of each once; two loaders over one data set aren't in step."""
    steps, _ = train(COMBINED["zipped"], 6, world_size=2)

    of_parts = [[idx for step in steps for part, idx, _ in step if part == k] for k in (0, 1)]
    assert [len(set(one)) for one in of_parts] == [24, 24]
    assert of_parts[0] != of_parts[1]


@pytest.mark.parametrize("given", [{"replacement": True}, {"num_samples": 12}], ids=str)
def test_a_random_sampler_stays_what_it_is(train, given):
    """With replacement, or of another number of samples, it is no `DistributedSampler`."""

    def make(size):
        return DataLoader(Drawing(26), size, sampler=RandomSampler(range(26), **given))

    steps, _ = train(make, 26 // 4 if "replacement" in given else 3, world_size=2)

    samples = [idx for step in steps for _, idx, _ in step]
    assert (len(set(samples)) < len(samples)) is ("replacement" in given)
    assert len(samples) == (24 if "replacement" in given else 12)


@pytest.mark.nightly
def test_two_ranks_that_go_on_in_mid_epoch_do_not_repeat(train):
    """Control: with a position shifted by one the steps are others."""
    make = LOADERS["shuffled"]
    expected, _ = train(make, world_size=2)
    seen, (states, generators, epoch) = train(make, 3, world_size=2)
    shifted = [{**one, "num_taken": one["num_taken"] + 1} for one in states]

    more, _ = train(make, saved=(shifted, generators, epoch), world_size=1)

    assert seen + more != expected


def test_another_global_batch_is_refused_with_the_size_to_set(train):
    """A step would take other samples, and it was asked for."""
    make = LOADERS["shuffled"]
    _, saved = train(make, 3, world_size=2)

    with pytest.raises(
        TaskError, match=r"with 4 samples a step, .* 3 samples[\s\S]*batch_size to 4"
    ):
        train(make, saved=saved, global_batch=3)


def by_batches(size):
    return DataLoader(Drawing(24), batch_sampler=BatchSampler(range(24), size, False))


def listed(size):
    return [(torch.arange(size), torch.zeros(size, dtype=torch.float64))] * (24 // size)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (by_batches, "has its own batches, made for 2 ranks; with 1 ranks, a step can't have"),
        (listed, "epoch of 6 batches with 2 ranks; now it has 12 with 1"),
    ],
    ids=["batch sampler", "list"],
)
def test_batches_that_cannot_be_made_anew_are_refused(train, make, words):
    """They are as large as their maker made them."""
    _, saved = train(make, 3, world_size=2)

    with pytest.raises(TaskError, match=words):
        train(make, saved=saved, global_batch=2)


def test_a_list_of_larger_batches_goes_on(train):
    """Each has what the batches of all ranks had."""
    _, saved = train(listed, 3, world_size=2)

    steps, _ = train(lambda size: listed(4), saved=saved)

    assert len(steps) == 3 + 2 * 6


class Split(Sampler):
    """Splits by rank itself, unevenly."""

    num_replicas = 2

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return iter(range(rank, 12 + 3 * rank))

    def __len__(self):
        return 12 + 2 * torch.distributed.get_rank()


class Stream(IterableDataset):
    """Longer on one rank than on the other."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        yield from ((torch.tensor(idx), torch.tensor(0.0)) for idx in range(8 + rank * 7))


class StatefulStream(IterableDataset):
    """The same, which says where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 8 + 7 * torch.distributed.get_rank():
            self.at += 1
            yield torch.tensor(self.at), torch.tensor(0.0)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


UNEVEN = {
    "list": lambda size: [*listed(2)[:4], *[(torch.arange(3), torch.zeros(3))] * 3],
    "sampler": lambda size: DataLoader(Drawing(26), size, sampler=Split()),
    "stream": lambda size: DataLoader(Stream(), size),
    "stateful": lambda size: StatefulDataLoader(StatefulStream(), size),
}


@pytest.mark.filterwarnings("ignore:.* batches were read again")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11
@pytest.mark.parametrize(
    "kind",
    [
        "stream",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in UNEVEN if one != "stream"),
    ],
)
def test_a_rank_that_has_run_out_repeats_the_same_batch(train, kind):
    """It counts for nothing in the loss, but a batch norm sees it."""
    expected, _ = train(UNEVEN[kind], world_size=2)
    longest = len(expected) // NUM_EPOCHS

    seen, saved = train(UNEVEN[kind], 1, world_size=2)
    for stop in (longest - 1, 10**6):  # at the last batch of the epoch
        more, saved = train(UNEVEN[kind], stop, saved, world_size=2)
        seen += more

    assert seen == expected


def test_a_stream_of_other_ranks_is_refused_in_mid_epoch(train):
    """Only they know where they were."""
    _, saved = train(UNEVEN["stream"], 2, world_size=2)

    with pytest.raises(TaskError, match=r"stopped in mid-epoch with 2 ranks, .*; now it has 1"):
        train(UNEVEN["stream"], saved=saved)
