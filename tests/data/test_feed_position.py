"""The position in the data: a run goes on with the batch, and the draws, that come next."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from eventloop.checkpoint.part_differences import differences
from eventloop.data.feed import Feed
from eventloop.distributed.processes import Processes
from eventloop.rng import get_rng_state, global_generators, set_rng_state

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 26, 4, 3
NUM_BATCHES = 7


class Saved(NamedTuple):
    """What a checkpoint holds of a run."""

    feed: dict[str, Any]
    generators: dict[str, Any]
    epoch: int


class Run:
    """What a training does with its data and with the generators, in small."""

    def __init__(self, dataloader: Any, saved: Saved | None = None, seed: int | None = 3) -> None:
        self.feed = Feed(dataloader, Processes(), sample_seed=seed)
        self.epoch = 0
        if saved is None:
            random.seed(1), np.random.seed(1), torch.manual_seed(1)
        else:
            random.seed(98), np.random.seed(98), torch.manual_seed(98)
            self.feed.load_state_dict(saved.feed)
            self.epoch = saved.epoch
            for name, one in global_generators().items():
                set_rng_state(one, saved.generators[name])

    def save(self) -> Saved:
        standing = {name: get_rng_state(one) for name, one in global_generators().items()}
        return copy.deepcopy(Saved(self.feed.state_dict(), standing, self.epoch))

    def steps(self, number: int | None = None, stop_at: int | None = None) -> list[Any]:
        """Trains for so many steps, or to the end; gives what each saw and drew."""
        seen = []
        while self.epoch < NUM_EPOCHS and number != len(seen):
            if not self.feed.under_way:
                self.feed.start_epoch(self.epoch)
            while number != len(seen) and self.feed.has_next():
                batch = self.feed.next()
                drawn = (random.random(), np.random.rand(), torch.rand(()).item())
                seen.append((self.epoch, as_plain(batch), drawn))
            if number != len(seen):
                self.feed.end_epoch()
                self.epoch += 1
        return seen


def as_plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_plain(one) for one in batch] if isinstance(batch, (list, tuple)) else batch


class Drawing(Dataset):
    """Each sample draws from Python, NumPy and torch; notes which were read."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        self.num = num
        self.read = torch.zeros(num, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> tuple[int, float, float, float]:
        self.read[idx] += 1
        return idx, random.random(), np.random.rand(), torch.rand(()).item()


class Batched(Drawing):
    """Reads a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[idx] for idx in indices]


class OwnGenerator(Sampler):
    """Shuffles with generators of its own, one of each kind, and counts its turns."""

    def __init__(self) -> None:
        self.random = random.Random(4)
        self.rng = np.random.default_rng(4)
        self.torch = torch.Generator().manual_seed(4)
        self.num_turns = 0
        self.indices = list(range(NUM_SAMPLES))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self):
        self.num_turns += 1
        self.random.shuffle(self.indices)
        for idx in self.indices:
            yield (idx + self.num_turns + int(self.rng.integers(3))) % NUM_SAMPLES
        torch.rand(2, generator=self.torch)


class Buckets(Sampler):
    """A batch sampler that shuffles buckets with Python's global generator."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self):
        buckets = [list(range(idx, NUM_SAMPLES, NUM_BATCHES)) for idx in range(NUM_BATCHES)]
        random.shuffle(buckets)
        yield from buckets


class Turning(Sampler):
    """Its state says which turn it is."""

    def __init__(self) -> None:
        self._hidden = iter([0])
        self.load_state_dict({"turn": 0})

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self):
        turn = next(self._hidden)
        self.load_state_dict({"turn": turn + 1})
        return iter(torch.arange(NUM_SAMPLES).roll(turn * 5).tolist())

    def state_dict(self):
        turn = next(self._hidden)
        self.load_state_dict({"turn": turn})
        return {"turn": turn}

    def load_state_dict(self, state):
        self._hidden = iter([state["turn"]])


def shuffled(dataset=None, **given):
    return DataLoader(dataset or Drawing(), BATCH_SIZE, shuffle=True, **given)


def with_generator(**given):
    generator = torch.Generator().manual_seed(5)
    return shuffled(generator=generator, **given)


def sampled(sampler, **given):
    return DataLoader(Drawing(), BATCH_SIZE, sampler=sampler, **given)


def others_generator(**given):
    drawn = RandomSampler(
        range(NUM_SAMPLES), replacement=True, generator=torch.Generator().manual_seed(6)
    )
    return sampled(drawn, **given)


def subset(**given):
    return shuffled(Subset(ConcatDataset([Drawing(), Drawing()]), range(NUM_SAMPLES)), **given)


MAP_STYLE: dict[str, Callable[..., Any]] = {
    "sequential": lambda **given: DataLoader(Drawing(), BATCH_SIZE, **given),
    "shuffled": shuffled,
    "generator": with_generator,
    "drop_last": lambda **given: shuffled(drop_last=True, **given),
    "subset": subset,
    "batched": lambda **given: shuffled(Batched(), **given),
    "replacement": others_generator,
    "weighted": lambda **given: sampled(
        WeightedRandomSampler(torch.arange(1.0, NUM_SAMPLES + 1), NUM_SAMPLES), **given
    ),
    "some": lambda **given: sampled(SubsetRandomSampler(range(3, 25)), **given),
    "own generators": lambda **given: sampled(OwnGenerator(), **given),
    "stateful sampler": lambda **given: sampled(Turning(), **given),
    "listed": lambda **given: sampled(list(range(NUM_SAMPLES)), **given),
    "buckets": lambda **given: DataLoader(Drawing(), batch_sampler=Buckets(), **given),
    "batches of batches": lambda **given: DataLoader(
        Drawing(), batch_sampler=BatchSampler(OwnGenerator(), 3, False), **given
    ),
    "samples": lambda **given: DataLoader(Drawing(20), batch_size=None, shuffle=True, **given),
}
STOPS = [(0,), (1,), (3,), (7,), (8,), (13, 14), (2, 4, 5)]


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize("make", MAP_STYLE.values(), ids=MAP_STYLE)
def test_a_run_goes_on_with_what_comes_next(make, stops):
    """Batches, draws of samples and draws of the training, wherever a run was stopped."""
    uninterrupted = Run(make())
    expected = uninterrupted.steps()

    run, seen = Run(make()), []
    for stop in stops:
        seen += run.steps(stop - len(seen))
        run = Run(make(), run.save())
    seen += run.steps()

    assert seen == expected
    # What comes after is the same, too: a checkpoint at the end tells nothing of the stops.
    kept = Run(make(), run.save())
    for one in (run, kept):
        assert list(differences(one.feed.state_dict(), uninterrupted.feed.state_dict())) == []


@pytest.mark.sampled(65)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [(0, 2, 1), (2, 0, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["shuffled", "generator", "replacement", "own generators"])
def test_workers_may_change(kind, workers, persistent):
    """Draws are tied to seed, epoch and index, not to who reads, nor to how far it is ahead."""
    make = MAP_STYLE[kind]
    made = [{"num_workers": n, "persistent_workers": persistent and n > 0} for n in workers]
    expected = Run(make(**made[0])).steps()

    run = Run(make(**made[0]))
    seen = run.steps(3)
    run = Run(make(**made[1]), run.save())
    seen += run.steps(6)
    seen += Run(make(**made[2]), run.save()).steps()

    assert seen == expected
