"""Checkpoints with digests that fit, of which a value was changed: refused by name, or harmless.

The rows are every key of every part of a checkpoint that a run has written, found by walking it, so
that a new key is a row by itself; and the ways to change a value.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import itertools
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, Trainer
from eventloop.checkpoint import checkpoint_files
from eventloop.errors import CheckpointError, EventloopError

MAX_CPU_S = 4.0  # of a slow machine
MAX_MORE_BYTES = 200 * 2**20
NUM_ROWS = 40  # of those that run with every change, drawn from all
GONE = object()

Path_ = tuple[Any, ...]

# What torch alone can judge, and does with the first step: rates that grow beyond every float, and
# flags of an optimizer that its state wasn't made with.
OPTIONS = ("optimizers", "adamw", "param_groups", 0)
LEFT_TO_TORCH = (
    (("training", "schedulers", "ba", 0, "state", "gamma"), "huge float"),
    ((*OPTIONS, "lr"), "huge float"),
    ((*OPTIONS, "amsgrad"), "yes"),
    ((*OPTIONS, "capturable"), "yes"),
)


class Rounds(RandomSampler):
    """A sampler that counts its turns, and remembers them in a name that only its code knows."""

    def __init__(self, data_source: Any) -> None:
        super().__init__(data_source, generator=torch.Generator().manual_seed(3))
        self.turn = 0

    def __iter__(self) -> Iterator[int]:
        self.turn += 1
        self._latest = self.turn
        return super().__iter__()


class Phase(enum.Flag):
    """A class of a value that a run changes."""

    WARM = 1
    LONG = 2


class Point(NamedTuple):
    """A class of instances that a run makes."""

    place: int


class Holding(nn.Linear):
    """Has something of every kind that a checkpoint has of objects."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.phase, self.points, self.first = Phase.WARM, [], Point(0)
        self.counts = collections.defaultdict(list, last=collections.deque([0], 3))
        self.late: Any = None
        self.bits, self.seeds = np.random.PCG64(1), np.random.SeedSequence(2)
        self.rngs = [random.Random(1), np.random.default_rng(1), torch.Generator()]
        self.iterators = [itertools.count(1.5, 2), itertools.cycle("abc"), iter(range(100))]
        self.times = itertools.repeat(1, 100)
        self.values = np.zeros(2), bytearray(2), array.array("d", [0.5])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.phase = Phase.WARM | Phase.LONG
            self.points.append(Point(next(self.times)))
            self.counts["last"].append(1)
            self.counts["made"].append({1, 2j})
            whole = torch.zeros(4)
            self.late = {"whole": whole, "view": whole[1:], "values": [range(3), np.float32(1)]}
            self.late["new"] = collections.defaultdict(list)
            self.bits.random_raw()
            self.seeds.spawn(1)
            for iterator in self.iterators:
                next(iterator)
            array_, bytes_, numbers = self.values
            array_[0], bytes_[0], numbers[0] = 1, 2, 0.25
        return super().forward(inputs)


def make_task() -> Task:
    """Makes a task of which a checkpoint holds something of every kind."""
    inputs = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.argmax(1))
    return Task(
        model=lambda: nn.Sequential(Holding(), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        loss=nn.functional.cross_entropy,
        train_dataloader=DataLoader(data, batch_size=4, sampler=Rounds(data)),
        eval_dataloaders=[(inputs, inputs.argmax(1))],
        metrics={"accuracy": MulticlassAccuracy(3)},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )


def train(run_dir: Any, resume: str = "auto") -> None:
    """Trains for 11 batches; the checkpoint at 8 of them is in the middle of the second epoch."""
    with Trainer(
        make_task(),
        run_dir=run_dir,
        resume=resume,
        device="cpu",
        autoload=False,
        max_duration="11ba",
        checkpoint_interval="4ba",
        checkpoint_best="max eval/accuracy",
        eval_interval="4ba",
    ) as trainer:
        trainer.fit()


def walked(nest: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yields the path of every value of a nest, those that hold others included."""
    if path:
        yield path
    entries = nest.items() if isinstance(nest, dict) else ()
    if isinstance(nest, list | tuple):
        entries = list(enumerate(nest))[:2]  # the rest are like them
    for key, one in entries:
        yield from walked(one, (*path, key))


class Change(NamedTuple):
    """A way to change a value; `make` is given the one that was there."""

    name: str
    make: Callable[[Any], Any]


CHANGES = (
    Change("gone", lambda value: GONE),
    Change("none", lambda value: None),
    Change("text", lambda value: "x; rm -rf ~"),
    Change("negative", lambda value: -5),
    Change("huge", lambda value: 2**62),
    Change("huge float", lambda value: 1e308),
    Change("nan", lambda value: float("nan")),
    Change("nested", lambda value: [{"a": [[value]]}]),
    Change("empty", lambda value: {}),
    Change("yes", lambda value: True),
    Change("tensor", lambda value: torch.zeros(0, 7)),
    Change("more", lambda value: value | {"step": 1, "__class__": 2} if _is_dict(value) else [0]),
)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def changed(nest: Any, path: Path_, make: Callable[[Any], Any]) -> Any:
    """Returns a copy of a nest with one value changed."""
    first, *rest = path
    made = list(nest) if isinstance(nest, tuple) else copy.copy(nest)
    new = changed(nest[first], tuple(rest), make) if rest else make(nest[first])
    if new is GONE:
        del made[first]
    else:
        made[first] = new
    return tuple(made) if isinstance(nest, tuple) else made


class Row(NamedTuple):
    """A key, and what becomes of it."""

    path: Path_
    change: Change


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> checkpoint_files.Checkpoint:
    """What a run saved, in the middle of its second epoch."""
    run_dir = tmp_path_factory.mktemp("written")
    train(run_dir)
    return checkpoint_files.read_checkpoint(run_dir / "checkpoints" / "ba00000008")


@pytest.fixture
def outcome(written, tmp_path) -> Callable[[Row], str]:
    """Trains on from a checkpoint with one change; returns how that ended."""

    def outcome(row: Row) -> str:
        where = tmp_path / str(len(list(tmp_path.iterdir())))
        whole = {**written.parts, "facts": written.facts}
        hostile = changed(whole, row.path, row.change.make)
        facts = hostile.pop("facts", {})
        if not isinstance(facts, dict):
            return "can't be written"
        try:
            checkpoint_files.write_checkpoint(where / "ba00000008", hostile, facts, batch=8)
        except CheckpointError:  # facts with a tensor
            return "can't be written"
        before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        start_s = time.process_time()
        try:
            train(where / "run", str(where / "ba00000008"))
            ended = "trained"
        except EventloopError as error:
            ended = f"{type(error).__name__}: {error.what}"
        assert time.process_time() - start_s < MAX_CPU_S
        after_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        assert after_bytes - before_bytes < MAX_MORE_BYTES
        return ended

    return outcome


def rows_of(written: checkpoint_files.Checkpoint) -> list[Row]:
    """Returns every key with every change."""
    paths = list(walked({**written.parts, "facts": written.facts}))
    rows = [Row(path, change) for path in paths for change in CHANGES]
    return [row for row in rows if (row.path, row.change.name) not in LEFT_TO_TORCH]


def failures(rows: list[Row], outcome: Callable[[Row], str]) -> list[str]:
    """Returns the rows that end in something other than a refusal or a run that works."""
    found = []
    for row in rows:
        named = f"{'.'.join(map(str, row.path))} {row.change.name}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ended = outcome(row)
            except Exception as error:
                found.append(f"{named}: {type(error).__name__}: {error}"[:300])
                continue
        if ended.startswith("CheckpointError") and "'" not in ended and row.path[0] not in ended:
            found.append(f"{named}: not named in {ended}")
    return found


def test_a_checkpoint_that_was_written_again_is_gone_on_from(outcome):
    """The negative control: without a change the run goes on."""
    assert outcome(Row(("training",), Change("same", lambda value: value))) == "trained"


@pytest.mark.nightly
def test_changed_values_are_refused_or_harmless(written, outcome):
    """A draw from all rows, the same each time."""
    rows = random.Random(0).sample(rows_of(written), NUM_ROWS)

    assert failures(rows, outcome) == []


@pytest.mark.nightly
def test_every_changed_value_is_refused_or_harmless(written, outcome):
    """Every key of every part, with each change."""
    assert failures(rows_of(written), outcome) == []
