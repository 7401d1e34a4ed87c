"""Runs with objects of any kind: killed and resumed, they end with the same bits, or name what is lost.

Set-ups are drawn: objects of a few kinds (`object_kinds.py`) in a few places of a task. Each trains in
forks, so that attributes of classes and globals begin anew as in a new process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import os
import pickle
import random
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, TrainerBuilder, hookimpl
from eventloop.errors import ResumeError
from eventloop.files import disk
from eventloop_fsdp import Fsdp
from eventloop_testing import pretend_device, run_ranks

# Under its own name: forks look its classes up.
_SPEC = importlib.util.spec_from_file_location(
    "object_kinds", Path(__file__).with_name("object_kinds.py")
)
object_kinds = importlib.util.module_from_spec(_SPEC)
sys.modules["object_kinds"] = object_kinds
_SPEC.loader.exec_module(object_kinds)
BATCH_SIZE = object_kinds.BATCH_SIZE
INPUTS = object_kinds.INPUTS
KINDS = object_kinds.KINDS
PLACES = object_kinds.PLACES
TARGETS = object_kinds.TARGETS
UNSAVABLE = object_kinds.UNSAVABLE
Model = object_kinds.Model

INTERVALS = ("1ba", "3ba", "1ep")
NUM_BATCHES = 6
NUM_EPOCHS = 3
# Each of these is the whole train data loader, or its data set, or its order.
_RIVALS = (
    {"stream", "loader", "dataset", "dataset_of_epochs"},
    {"stream", "loader", "sampler", "batch_sampler", "sampler_in_batch_sampler"},
    {"stream", "loader", "collate_fn"},
    {"attribute_of_model", "attribute_of_parameter"},
    {"loss_module", "loss_function"},
    {"optimizer_step", "optimizer_hook"},
)


# What can't be saved of a map-style data set is left out without a word, but for iterators: it is read by
# index, and opens files and fills caches again.
_READ_BY_INDEX = ("dataset", "dataset_of_epochs", "collate_fn")


class Setup(NamedTuple):
    """Objects in places, and when the run is killed.

    Attributes:
        objects: a kind and the places that use the same object of it.
        interval: of checkpoints.
        kill_at: the batch before which the run ends.
        workers: settings of the train data loader.
    """

    objects: tuple[tuple[str, tuple[str, ...]], ...]
    interval: str
    kill_at: int
    workers: tuple[tuple[str, Any], ...] = ()

    @property
    def is_savable(self) -> bool:
        """Whether nothing of it may be lost."""
        return not any(kind in UNSAVABLE for kind, _ in self.objects)


def drawn_setup(seed: int, but: tuple[str, ...] = (), **workers: Any) -> Setup:
    """Returns the set-up of a seed.

    Args:
        but: places that no object is in.
        workers: settings of the train data loader.
    """
    draw = random.Random(seed)
    free_places = [name for name in PLACES if name not in but]
    objects = []
    for _ in range(draw.randint(1, 4)):
        name = draw.choice(free_places)
        places = [name]
        free_places = without_rivals(free_places, name)
        kinds = [
            kind
            for kind in KINDS
            if ("metric" not in name or is_copied(kind))
            and not (name in _READ_BY_INDEX and kind in UNSAVABLE)
        ]
        objects.append((draw.choice(kinds), tuple(places)))
    kill_at = draw.randrange(1, NUM_BATCHES * NUM_EPOCHS)
    return Setup(tuple(objects), draw.choice(INTERVALS), kill_at, tuple(workers.items()))


@functools.cache
def is_copied(kind: str) -> bool:
    """Returns whether an object may be a part of a metric, of which each eval set has a copy."""
    try:
        copy.deepcopy(KINDS[kind]())()
    except (TypeError, AttributeError):
        return False
    return True


def without_rivals(places: list[str], name: str) -> list[str]:
    """Returns the places that a task may still use."""
    rivals = {name}.union(*(group for group in _RIVALS if name in group))
    return [place for place in places if place not in rivals]


def make_task(setup: Setup) -> Task:
    """Builds the task of a set-up, with objects that no other task has."""
    parts: dict[str, Any] = {
        "model": Model,
        "on_model": [],
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "scheduler": None,
        "data": {},
        "metrics": None,
        "train_metrics": None,
    }
    for kind, places in setup.objects:
        draw = KINDS[kind]()
        for place in places:
            PLACES[place](draw, parts)

    def make_model():
        model = parts["model"]()
        for change in parts["on_model"]:
            change(model)
        return model

    data = {"dataset": TensorDataset(INPUTS, TARGETS), "batch_size": BATCH_SIZE, **parts["data"]}
    data |= dict(setup.workers)
    if "batch_sampler" in data:
        del data["batch_size"]
    eval_data = parts.get("eval_dataset", TensorDataset(INPUTS, TARGETS))
    values = {
        "model": make_model,
        "loss": parts["loss"],
        "train_dataloader": parts.get("train_dataloader") or DataLoader(**data),
        "eval_dataloaders": {
            "valid": DataLoader(eval_data, BATCH_SIZE, sampler=parts.get("eval_sampler"))
        },
        "optimizer": lambda model: parts["optimizer"](model.parameters()),
        "metrics": parts["metrics"],
        "train_metrics": parts["train_metrics"],
    }
    if parts["scheduler"] is not None:
        curve = parts["scheduler"]
        values["scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, curve)
    return Task(**values)


class KilledError(Exception):
    """Ends a run without an evaluation or a checkpoint at its end."""


class Kill:
    """Raises before a batch."""

    name = "kill"
    free_options = ("batch",)

    def __init__(self, batch):
        self.batch = batch

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == self.batch:
            raise KilledError


class Outcome(NamedTuple):
    """What a run ended with.

    Attributes:
        bits: weights, states of optimizers and rows of the history; None of a killed run.
        refused: why it wasn't resumed; "" if it was.
        messages: of all warnings.
    """

    bits: Any
    refused: str
    messages: list[str]


def train(
    setup: Setup,
    run_dir: Any,
    interval: str | None = None,
    kill_at: int | None = None,
    **settings: Any,
) -> Outcome:
    """Trains in this process."""
    disk.sync = disk.sync_folder = lambda *_: None  # no power fails here
    torch.manual_seed(0)
    random.seed(0)
    refused, bits = "", None
    settings = {
        "autoload": False,
        "device": "cpu",
        "run_dir": run_dir,
        "max_duration": f"{NUM_EPOCHS}ep",
        "checkpoint_interval": interval,
        "eval_interval": "4ba",
        "log_interval": "1ba",
        "callbacks": [Kill(-1 if kill_at is None else kill_at)],
        **settings,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with TrainerBuilder().build(make_task(setup), **settings) as trainer:
                with contextlib.suppress(KilledError):
                    history = trainer.fit().history
                    bits = bits_of(trainer.state, history)
        except ResumeError as error:
            refused = str(error)
    return Outcome(bits, refused, [str(warning.message) for warning in caught])


def bits_of(state: Any, history: Any) -> Any:
    """Returns what two runs are compared by, in plain values."""
    rows = [repr({name: row[name] for name in row if name != "seconds"}) for row in history]
    return {
        "model": plain(state.model.state_dict()),
        "optimizers": [plain(one.state_dict()) for one in state.optimizers.values()],
        "rows": rows,
    }


def plain(nest: Any) -> Any:
    """Returns a nest with the bytes of its tensors."""
    if isinstance(nest, DTensor):
        nest = nest.to_local()
    if isinstance(nest, torch.Tensor):
        return str(nest.dtype), tuple(nest.shape), nest.detach().cpu().numpy().tobytes()
    if isinstance(nest, dict):
        return {key: plain(entry) for key, entry in nest.items()}
    if isinstance(nest, list | tuple):
        return [plain(entry) for entry in nest]
    return repr(nest)


def in_fork(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the result of a function that ran in a process of its own."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        gc.freeze()
        os.close(reading)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            result = traceback.format_exc()
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(result, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pickle.load(pipe)
    os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return result


def on_pretend_device(*args: Any) -> Outcome:
    """Trains on the pretend accelerator, with tensors and generators of kinds there."""
    with pretend_device() as device:
        object_kinds.DEVICE = device
        return train(*args, device=device.type, precision="fp32")


def problem_of(setup: Setup, folder: Any, train: Any = train) -> str:
    """Runs a set-up in one go, and killed and resumed; returns what is wrong, "" if nothing is.

    Args:
        train: trains in this process.
    """
    whole = in_fork(train, setup, folder / "whole")
    killed = in_fork(train, setup, folder / "killed", setup.interval, setup.kill_at)
    resumed = in_fork(train, setup, folder / "killed", setup.interval)
    for outcome in (whole, killed, resumed):
        if isinstance(outcome, str):
            return f"failed: {outcome}"
    return verdict(setup, whole, killed, resumed)


def verdict(setup: Setup, whole: Outcome, killed: Outcome, resumed: Outcome) -> str:
    """Returns what is wrong with the outcomes of a set-up's three runs; "" if nothing is."""
    misfits = [message for message in resumed.messages if "don't fit the objects" in message]
    named = [
        message for message in killed.messages if "lack" in message or "isn't saved" in message
    ]
    if resumed.refused:
        if "the checkpoint lacks" not in resumed.refused:
            return f"refused for another reason: {resumed.refused}"
        if not named:
            return f"refused without a warning before: {resumed.refused}"
        return f"named, and can be saved: {resumed.refused}" if setup.is_savable else ""
    if misfits:
        return f"doesn't fit: {misfits[0]}"
    if resumed.bits != whole.bits:
        parts = [name for name in whole.bits if whole.bits[name] != resumed.bits[name]]
        return f"other bits in {', '.join(parts)}; named: {named}"
    return ""


# What workers change in their copies of a data set isn't seen; an iterable has other batches there.
_READ_BY_WORKERS = ("dataset", "dataset_of_epochs", "collate_fn", "stream", "loader")
# FSDP2 and a move to the pretend accelerator replace parameters, with or without a kill.
_ATTRIBUTES_OF_PARAMETERS = ("attribute_of_parameter",)
_TRAIN_DATA = (*_READ_BY_WORKERS, "sampler", "batch_sampler", "sampler_in_batch_sampler")


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory):
    """What forks need is imported once."""
    import torch._dynamo  # noqa: F401  optimizers want it, and each fork would take seconds for it

    train(Setup((), "1ba", 2), tmp_path_factory.mktemp("first"), "1ba", 2)


def failures(tmp_path: Any, setups: list[Setup], train: Any = train) -> list[str]:
    """Returns what is wrong with set-ups, a line each."""
    lines = []
    for number, setup in enumerate(setups):
        problem = problem_of(setup, tmp_path / str(number), train)
        if problem:
            lines.append(f"{setup}: {problem}")
    return lines


def nights(*starts: int) -> list[Any]:
    return [pytest.param(start, marks=pytest.mark.nightly) for start in starts]


@pytest.mark.parametrize("start", nights(*range(0, 500, 20)))
def test_a_killed_run_ends_with_the_same_bits_or_names_what_it_lost(tmp_path, start):
    """500 drawn set-ups: nothing is lost in silence, and what can be saved is saved."""
    setups = [drawn_setup(seed) for seed in range(start, start + 20)]

    assert failures(tmp_path, setups) == []


@pytest.mark.parametrize("place", ["model", "sampler", "forward_hook"])
def test_a_few_kinds_end_with_the_same_bits(tmp_path, place):
    """Those that a walk over attributes alone doesn't see."""
    kinds = ("MethodOfGenerator", "ViewOfBytes", "Queued")

    assert failures(tmp_path, [Setup(((kind, (place,)),), "3ba", 8) for kind in kinds]) == []


@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("start", nights(*range(0, 100, 20)))
def test_with_two_workers_too(tmp_path, start, persists):
    """Beside what the workers' copies of a data set count."""
    workers = {"num_workers": 2, "persistent_workers": persists}
    setups = [drawn_setup(seed, _READ_BY_WORKERS, **workers) for seed in range(start, start + 20)]

    assert failures(tmp_path, setups) == []


@pytest.mark.parametrize("start", nights(*range(0, 100, 20)))
def test_on_an_accelerator_too(tmp_path, start):
    """Tensors and generators of the device are restored there."""
    setups = [drawn_setup(seed, _ATTRIBUTES_OF_PARAMETERS) for seed in range(start, start + 20)]

    assert failures(tmp_path, setups, on_pretend_device) == []


@pytest.mark.parametrize("start", nights(*range(0, 100, 20)))
def test_on_two_ranks_too(tmp_path, start):
    """Each rank has objects of its own."""
    setups = {seed: drawn_setup(seed, _TRAIN_DATA) for seed in range(start, start + 20)}

    assert failures_of_ranks(tmp_path, setups, train) == []


def under_fsdp(*args: Any) -> Outcome:
    """Trains with parameters that are sharded over the ranks."""
    return train(*args, algorithms=[Fsdp()])


@pytest.mark.parametrize("start", nights(*range(0, 100, 20)))
def test_under_fsdp_too(tmp_path, start):
    """Sharded parameters beside objects of each rank."""
    left_out = (*_TRAIN_DATA, *_ATTRIBUTES_OF_PARAMETERS)
    setups = {seed: drawn_setup(seed, left_out) for seed in range(start, start + 20)}

    assert failures_of_ranks(tmp_path, setups, under_fsdp) == []


def failures_of_ranks(tmp_path: Any, setups: dict[int, Setup], train: Any) -> list[str]:
    """Returns what is wrong with set-ups on two ranks, a line for each rank."""
    lines = []
    for seed, setup in setups.items():
        whole = run_ranks(train, setup, tmp_path / f"whole{seed}")
        folder = tmp_path / f"killed{seed}"
        killed = run_ranks(train, setup, folder, setup.interval, setup.kill_at)
        resumed = run_ranks(train, setup, folder, setup.interval)
        messages = [message for outcome in killed for message in outcome.messages]
        for rank in range(2):
            named = killed[rank]._replace(messages=messages)
            problem = verdict(setup, whole[rank], named, resumed[rank])
            if problem:
                lines.append(f"{seed}, rank {rank}: {setup}: {problem}")
    return lines
