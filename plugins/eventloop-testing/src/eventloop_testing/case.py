"""Tiny runs for tests, and a plugin under check in them, each in a folder of its own."""

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
# Where trainers train that are given no device; `pytest --device` sets it.
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
        found: the plugin as trainers know it.
        is_resumed: whether a resumed run of one process was found to be one run.
        found_on_host: what was found wrong in a step on the CPU.
    """

    plugin: type
    role: Role
    options: dict[str, Any]
    task: Callable[[], Task]
    folder: Path
    found: Plugin = field(init=False)
    is_resumed: bool = field(init=False, default=False)
    found_on_host: set[str] = field(init=False, default_factory=set)
    _num_folders: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        with self.trainer(self.build()) as trainer:
            self.found = next(one for one in trainer.plugins if type(one.target) is self.plugin)

    def build(self) -> Any:
        """Returns a new instance."""
        return self.plugin(**self.options)

    def new_folder(self) -> Path:
        """Names a folder, on all ranks the same."""
        self._num_folders += 1
        return self.folder / str(self._num_folders)

    def trainer(
        self,
        *plugins: object,
        algorithms: tuple[object, ...] = (),
        callbacks: tuple[object, ...] = (),
        folder: Path | None = None,
        **given: Any,
    ) -> Trainer:
        """Builds a trainer with instances of the plugin, and with others before it."""
        given = {"max_duration": "2ep", **given}
        mine = {"algorithm": [*algorithms], "callback": [*callbacks]}
        mine[self.role] += plugins
        return isolated_trainer(
            folder or self.new_folder(),
            self.task(),
            algorithms=mine["algorithm"],
            callbacks=mine["callback"],
            **given,
        )

    def run(self, *plugins: object, **given: Any) -> Run:
        """Trains, evaluates and predicts."""
        check = Check()
        with self.trainer(*plugins, observers=[check], **given) as trainer:
            trainer.fit()
            num_batches = trainer.state.clock.batch
            if trainer.state.eval_dataloaders:
                trainer.eval()
                trainer.predict(next(iter(trainer.state.eval_dataloaders.values())))
            called = {
                name: [one.plugin.name for one in ordered]
                for name, ordered in trainer.assembly.implementations.items()
            }
            return Run(weights_of(trainer), check.findings, called, num_batches)


class Other:
    """An algorithm that everything else must get along with: it shrinks every gradient."""

    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        """Shrinks them."""
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
        """Raises, when it is time."""
        if state.clock.batch == self.batch:
            raise ExpectedError


class Stops:
    """An algorithm that stops a run after a batch, as a callback under check did."""

    name = "check-plugin-stops"

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def should_stop(self, state: Any) -> bool:
        """Answers from the clock."""
        return bool(state.clock.batch >= self.batch)


class ExpectedError(Exception):
    """What `Fails` raises."""


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Returns a copy of the model's weights."""
    return {name: tensor.clone() for name, tensor in trainer.state.model.state_dict().items()}


def equal(one: Any, other: Any) -> bool:
    """Returns whether two nests of tensors and values are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def tiny_batches(num_batches: int = 3, batch_size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Makes batches of a problem with three classes; the same ones each time.

    Returns:
        Pairs of inputs, float32 of shape (batch_size, 3), and targets, int64 of shape
        (batch_size,).
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_batches, batch_size, 3, generator=generator)
    return [(batch, batch.argmax(1)) for batch in inputs]


def shuffled_batches(
    num_batches: int = 5, batch_size: int = 4, **given: Any
) -> DataLoader[tuple[Tensor, ...]]:
    """Makes a data loader of the samples of `tiny_batches`, which it shuffles.

    Args:
        given: what else `DataLoader` takes.
    """
    inputs, targets = map(torch.cat, zip(*tiny_batches(num_batches), strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True, **given)


def tiny_task(**given: Any) -> Task:
    """Makes a task that trains in a blink: 3 batches of 4 samples an epoch, one data set to test.

    Args:
        given: what of `Task` shall be something else.
    """
    if "metrics" not in given:
        # Imported for a task that has them, as importing torchmetrics takes longer than torch.
        from torchmetrics.classification import MulticlassAccuracy

        given["metrics"] = {"accuracy": MulticlassAccuracy(3)}
    values = {
        "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)),
        "loss": cross_entropy,
        "train_dataloader": tiny_batches(),
        "eval_dataloaders": {"test": tiny_batches(2)},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }
    return Task(**cast("dict[str, Any]", values | given))


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
        task: `tiny_task()` unless given.
        algorithms, callbacks: see `Trainer`.
        observers, allowed, origin: see `Request`.
        settings: on the device of `pytest --device`, the CPU unless given, for one epoch, without
            checkpoints.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()  # the search for one upwards ends here
    chosen = {
        "device": default_device,
        "max_duration": "1ep",
        "run_dir": folder / "run",
        "checkpoint_interval": None,
        "autoload": False,
    } | settings
    given = tiny_task() if task is None else task
    configuration = Configuration.read(chosen, environ={}, directory=folder)
    more = (observers, allowed, origin)
    return Trainer.of_request(Request(given, configuration, algorithms, callbacks, *more))


class Recorder:
    """A plugin of which `recorder` makes a class with hooks.

    Attributes:
        seen: the names of the hooks, as they are called.
    """

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[str] = []


def recorder(hooks: Iterable[str] = tuple(EVENTS), name: str = "recorder") -> Recorder:
    """Makes a plugin whose `seen` lists hooks by name as they are called.

    Args:
        hooks: events and questions; all events unless given.
    """
    methods = {hook: hookimpl(_recording(hook)) for hook in hooks}
    kind = type("Recorder", (Recorder,), {"name": name, **methods})
    return cast("Recorder", kind())


def _recording(hook: str) -> Callable[..., None]:
    def record(self: Recorder, state: object) -> None:
        self.seen.append(hook)

    return record
