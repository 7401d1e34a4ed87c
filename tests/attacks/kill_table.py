"""What is killed: kinds of loaders, plugins and ends of runs. A new kind is a row."""

from __future__ import annotations

import itertools
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from eventloop import hookimpl, schedules
from eventloop.data import cycled, zipped
from eventloop.task import Task
from eventloop_ema import Ema
from eventloop_finetune import Unfreeze
from eventloop_mixup import Mixup
from eventloop_sam import Sam
from eventloop_selective_backprop import SelectiveBackprop
from eventloop_swa import Swa
from eventloop_testing.case import tiny_batches, tiny_task

NUM_BATCHES = 14  # of 4 samples an epoch, the last one of 3
NUM_SAMPLES = 55


class Noisy(Dataset):
    """Samples with noise from two generators, drawn where they are read."""

    def __init__(self):
        self.inputs = torch.cat([batch for batch, _ in tiny_batches(NUM_BATCHES)])[:NUM_SAMPLES]

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, idx):
        sample = self.inputs[idx] + 0.1 * torch.randn(3) + random.gauss(0, 0.1)
        return sample, self.inputs[idx].argmax()


class Stream(IterableDataset):
    """The same samples in a row; of a worker those that are its turn."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        inputs = Noisy().inputs
        return iter(
            [(inputs[idx], inputs[idx].argmax()) for idx in range(first, NUM_SAMPLES, step)]
        )


class Position(IterableDataset):
    """Samples in an order of each epoch's own; it knows where it is."""

    def __init__(self):
        self.epoch = self.at = 0

    def __iter__(self):
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        inputs = Noisy().inputs
        for idx in order.tolist()[self.at :]:
            self.at += 1
            yield inputs[idx], inputs[idx].argmax()
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


class Chunks:
    """A batch sampler with a generator of its own, which counts its epochs."""

    def __init__(self):
        self.rng = random.Random(7)
        self.num_epochs = 0

    def __len__(self):
        return NUM_BATCHES

    def __iter__(self):
        self.num_epochs += 1
        order = self.rng.sample(range(NUM_SAMPLES), NUM_SAMPLES)
        for start in range(0, NUM_SAMPLES, 4):
            yield order[start : start + 4][:: (-1) ** self.num_epochs]


class Drawing:
    """A plain iterable that shuffles by the generator that everything shares."""

    def __iter__(self):
        batches = tiny_batches(NUM_BATCHES)
        for idx in torch.randperm(NUM_BATCHES).tolist():
            yield batches[idx]


class Pairs:
    """A stranger's wrapper of two data loaders, each with a generator of its own."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return zip(*self.loaders, strict=False)


def inputs_alone(**given):
    """Inputs in another order each epoch."""
    return DataLoader(list(Noisy().inputs), 4, shuffle=True, drop_last=True, **given)


def targets_alone(num, **given):
    """Targets in an order of their own, which goes on where the inputs' epoch ends."""
    generator = torch.Generator().manual_seed(7)
    return DataLoader(torch.arange(num) % 3, 4, shuffle=True, generator=generator, **given)


class Counts:
    """An algorithm with a state, which draws from every generator there is, at every event."""

    name = "counts"

    def __init__(self):
        self.sum = torch.zeros(3)

    def draw(self, state):
        noise = torch.rand(3, generator=state.generator("counts")) + random.random()
        self.sum = 0.9 * self.sum + noise + torch.rand(3)

    @hookimpl
    def epoch_start(self, state):
        if not state.resumed:
            self.draw(state)

    @hookimpl
    def epoch_end(self, state):
        self.draw(state)

    @hookimpl
    def before_train_batch(self, state):
        self.draw(state)
        state.inputs = state.inputs + 0.01 * self.sum
        state.log("counts/sum", self.sum.sum())

    def state_dict(self):
        return {"sum": self.sum}

    def load_state_dict(self, state, version):
        self.sum = state["sum"]


class Stops:
    """An algorithm that stops the run, in mid-epoch."""

    name = "stops"
    last = 17

    @hookimpl
    def should_stop(self, state):
        return state.clock.batch >= self.last


LOADERS = {
    "list": lambda: tiny_batches(NUM_BATCHES),
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "weighted": lambda: DataLoader(
        Noisy(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 1.0 + NUM_SAMPLES), NUM_SAMPLES)
    ),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "lasting workers": lambda: DataLoader(
        Noisy(), 4, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=Chunks()),
    "stateful": lambda: StatefulDataLoader(Position(), 4),
    "stateful, workers": lambda: StatefulDataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "iterable": lambda: DataLoader(Stream(), 4),
    "iterable, workers": lambda: DataLoader(Stream(), 4, num_workers=2),
    "plain iterable": Drawing,
    "zipped": lambda: zipped(inputs_alone(), targets_alone(72)),
    "cycled": lambda: zipped(inputs_alone(), cycled(targets_alone(20))),
    "cycled, workers": lambda: zipped(
        inputs_alone(num_workers=1), cycled(targets_alone(20, num_workers=1))
    ),
    "a stranger's wrapper": lambda: Pairs(
        inputs_alone(generator=torch.Generator().manual_seed(5)), targets_alone(72)
    ),
}
PLUGINS = {
    "none": list,
    "mixup": lambda: [Mixup(alpha=0.4)],
    "ema": lambda: [Ema(half_life="5ba")],
    "sam": lambda: [Sam()],
    "swa": lambda: [Swa(start="0.3dur", interval="4ba")],
    "selective": lambda: [SelectiveBackprop(keep_frac=0.75, start="2ba", end="90ba")],
    "unfreeze": lambda: [Unfreeze({"0": "0.4dur", "1": "3ba"})],
    "counts": lambda: [Counts()],
    "several": lambda: [Mixup(alpha=0.4), Ema(half_life="5ba"), Counts()],
    "stops": lambda: [Counts(), Stops()],
}
# Each command trains to a length; a run is extended by the next one.
ENDS = {
    "at an epoch's end": ("28ba",),
    "in mid-epoch": ("20ba",),
    "extended": ("20ba", "33ba"),
    "extended twice": ("21ba", "28ba", "33ba"),
}


def commands(row: tuple[str, str, str]) -> list[tuple[str, int]]:
    """Returns the lengths to which a row is trained, each with the batch count of its last save."""
    _, plugins, end = row
    found = [(until, int(until.removesuffix("ba"))) for until in ENDS[end]]
    # A run that a plugin stopped isn't gone on with.
    return [(found[0][0], Stops.last)] if plugins == "stops" else found


def task(loader: str) -> Task:
    """Returns a task of dropout, batch norm, AdamW and a schedule, on batches of one kind."""
    return tiny_task(
        model=lambda: nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        ),
        train_dataloader=LOADERS[loader](),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        scheduler=schedules.cosine(warmup="0.1dur"),
    )


# Refused when the trainer is built: swa goes over the data once more, for batch norms.
REFUSED = {
    (loader, "swa")
    for loader in (
        "stateful",
        "iterable",
        "iterable, workers",
        "plain iterable",
        "a stranger's wrapper",
    )
}


def rows() -> list[tuple[str, str, str]]:
    """Returns every loader with every plugin; the ends of runs take turns."""
    pairs = (one for one in itertools.product(LOADERS, PLUGINS) if one not in REFUSED)
    return [(*pair, end) for pair, end in zip(pairs, itertools.cycle(ENDS), strict=False)]


def quick_rows() -> list[tuple[str, str, str]]:
    """Returns each loader, each plugin and each end at least once; of those with workers one.

    Workers take seconds for each start, and a row starts a dozen times.
    """
    quick = [one for one in LOADERS if "workers" not in one or one == "workers"]
    return list(zip(quick, itertools.cycle(PLUGINS), itertools.cycle(ENDS), strict=False))
