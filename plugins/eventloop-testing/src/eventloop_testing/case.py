"""Tiny runs for tests, and a plugin under check in them, each in its own folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop.config.configuration import Configuration
from eventloop.events import EVENTS
from eventloop.hook_markers import hookimpl
from eventloop.run.differences import NOTHING, Allowed
from eventloop.run.open import Request
from eventloop.task import Task
from eventloop.trainer import Trainer
from eventloop_check import Check

if TYPE_CHECKING:
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.records import Plugin
    from eventloop_check import Finding

Role = Literal["algorithm", "callback"]
# The device of trainers without a `device` setting; `pytest --device` sets it.
default_device = "cpu"


class Run(NamedTuple):
    """The results of a run: weights, findings, plugins called for each hook, number of batches."""

    weights: dict[str, Tensor]
    findings: list[Finding]
    called: dict[str, list[str]]
    num_batches: int


@dataclass
class Case:
    """A plugin under check.

    Attributes:
        record: the plugin's record in a trainer.
        is_resumed: whether a run in a single process was found to resume exactly.
        found_on_host: violations found in a step on the CPU.
    """

    plugin: type
    role: Role
    options: dict[str, Any]
    task: Callable[[], Task]
    folder: Path
    record: Plugin = field(init=False)
    is_resumed: bool = field(init=False, default=False)
    found_on_host: set[str] = field(init=False, default_factory=set)
    _num_folders: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        with self.trainer(self.build()) as trainer:
            self.record = next(
                plugin for plugin in trainer.plugins if type(plugin.target) is self.plugin
            )

    def build(self) -> Any:
        """Returns a new instance."""
        return self.plugin(**self.options)

    def new_folder(self) -> Path:
        """Returns the path of a new folder, the same on all ranks."""
        self._num_folders += 1
        return self.folder / str(self._num_folders)

    def trainer(
        self,
        *plugins: object,
        algorithms: tuple[object, ...] = (),
        callbacks: tuple[object, ...] = (),
        folder: Path | None = None,
        **settings: Any,
    ) -> Trainer:
        """Builds a trainer with instances of the plugin, and other plugins listed before them."""
        settings = {"max_duration": "2ep", **settings}
        plugins_of_role = {"algorithm": [*algorithms], "callback": [*callbacks]}
        plugins_of_role[self.role] += plugins
        return isolated_trainer(
            folder or self.new_folder(),
            self.task(),
            algorithms=plugins_of_role["algorithm"],
            callbacks=plugins_of_role["callback"],
            **settings,
        )

    def run(self, *plugins: object, **settings: Any) -> Run:
        """Trains, evaluates and predicts."""
        check = Check()
        with self.trainer(*plugins, observers=[check], **settings) as trainer:
            trainer.fit()
            num_batches = trainer.state.clock.batch
            if trainer.state.eval_dataloaders:
                trainer.eval()
                trainer.predict(next(iter(trainer.state.eval_dataloaders.values())))
            called = {
                name: [implementation.plugin.name for implementation in ordered]
                for name, ordered in trainer.assembly.implementations.items()
            }
            return Run(weights_of(trainer), check.findings, called, num_batches)


class Other:
    """An algorithm that everything else must get along with: it shrinks every gradient."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        """Multiplies the gradients by 0.9."""
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.9)


class Fails:
    """An algorithm that ends a run after a batch."""

    name = "fails"
    free_options = ("batch",)

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def batch_end(self, state: Any) -> None:
        """Raises ExpectedError after the given batch."""
        if state.clock.batch == self.batch:
            raise ExpectedError


class Stops:
    """An algorithm that stops a run after a batch, to repeat a run that a callback under check stopped."""

    name = "check-plugin-stops"

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def should_stop(self, state: Any) -> bool:
        """Whether the run has reached the batch."""
        return bool(state.clock.batch >= self.batch)


class ExpectedError(Exception):
    """The exception that `Fails` raises."""


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Returns a copy of the model's weights."""
    return {name: tensor.clone() for name, tensor in trainer.state.model.state_dict().items()}


def equal(value: Any, other_value: Any) -> bool:
    """Whether two nests of tensors and values are equal, bit by bit."""
    if isinstance(value, Tensor) and isinstance(other_value, Tensor):
        return value.dtype == other_value.dtype and torch.equal(value, other_value)
    if isinstance(value, Mapping) and isinstance(other_value, Mapping):
        return value.keys() == other_value.keys() and all(
            equal(value[key], other_value[key]) for key in value
        )
    if isinstance(value, (list, tuple)) and isinstance(other_value, (list, tuple)):
        return len(value) == len(other_value) and all(map(equal, value, other_value))
    return bool(value == other_value)


def tiny_batches(num_batches: int = 3, batch_size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Makes batches of a problem with three classes; the same batches each time.

    Returns:
        Pairs of inputs, float32 of shape (batch_size, 3), and targets, int64 of shape
        (batch_size,).
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_batches, batch_size, 3, generator=generator)
    return [(batch, batch.argmax(1)) for batch in inputs]


def shuffled_batches(
    num_batches: int = 5, batch_size: int = 4, **options: Any
) -> DataLoader[tuple[Tensor, ...]]:
    """Makes a shuffling data loader of the samples of `tiny_batches`.

    Args:
        options: further arguments of `DataLoader`.
    """
    inputs, targets = map(torch.cat, zip(*tiny_batches(num_batches), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True, **options)


def tiny_task(**options: Any) -> Task:
    """Makes a task that trains in milliseconds: 3 batches of 4 samples per epoch, and a test set.

    Args:
        options: arguments of `Task` that replace the defaults.
    """
    if "metrics" not in options:
        # Only for a task that uses it: importing torchmetrics takes longer than importing torch.
        from torchmetrics.classification import MulticlassAccuracy

        options["metrics"] = {"accuracy": MulticlassAccuracy(3)}
    values = {
        "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)),
        "loss": cross_entropy,
        "train_dataloader": tiny_batches(),
        "eval_dataloaders": {"test": tiny_batches(2)},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    return Task(**cast("dict[str, Any]", values | options))


def isolated_trainer(
    folder: Path,
    task: object = None,
    *,
    algorithms: Sequence[object] = (),
    callbacks: Sequence[object] = (),
    observers: Sequence[Observer] = (),
    allowed: Allowed = NOTHING,
    origin: Mapping[str, Any] | None = None,
    **settings: object,
) -> Trainer:
    """Builds a trainer that sees neither installed plugins nor variables nor `pyproject.toml`.

    Args:
        folder: where the run's files go.
        task: the task; by default `tiny_task()`.
        algorithms, callbacks: see `Trainer`.
        observers, allowed, origin: see `Request`.
        settings: settings of the run; by default the device of `pytest --device`, one epoch, and no
            checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()  # ends the upward search for this file here
    chosen = {
        "device": default_device,
        "max_duration": "1ep",
        "run_dir": folder / "run",
        "checkpoint_interval": None,
        "autoload": False,
    } | settings
    task_or_default = tiny_task() if task is None else task
    configuration = Configuration.read(chosen, environ={}, directory=folder)
    request_options = (observers, allowed, origin)
    return Trainer.of_request(
        Request(task_or_default, configuration, algorithms, callbacks, *request_options)
    )


class Recorder:
    """Base class of the plugins that `recorder` makes.

    Attributes:
        seen: names of the hooks, in the order of the calls.
    """

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[str] = []


def recorder(hooks: Iterable[str] = tuple(EVENTS), name: str = "recorder") -> Recorder:
    """Makes a plugin whose `seen` lists the names of hooks in the order of their calls.

    Args:
        hooks: events and questions to record; by default all events.
    """
    methods = {hook: hookimpl(_recording(hook)) for hook in hooks}
    kind = type("Recorder", (Recorder,), {"name": name, **methods})
    return cast("Recorder", kind())


def _recording(hook: str) -> Callable[..., None]:
    def record(self: Recorder, state: object) -> None:
        self.seen.append(hook)

    return record
