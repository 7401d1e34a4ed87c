"""Small runs: a task that trains in a blink, a trainer of its own, and who was called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from eventloop.config.configuration import Configuration
from eventloop.events import Event
from eventloop.hooks import hookimpl
from eventloop.run.start import NOTHING, Allowed
from eventloop.task import Task
from eventloop.trainer import Trainer, TrainerBuilder

if TYPE_CHECKING:
    from eventloop.plugin.observe import Observer


def tiny_batches(num_batches: int = 3, batch_size: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Makes batches of a problem with three classes; the same ones each time.

    Returns:
        Pairs of inputs, float32 of shape (batch_size, 3), and targets, int64 of shape
        (batch_size,).
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_batches, batch_size, 3, generator=generator)
    return [(batch, batch.argmax(1)) for batch in inputs]


def tiny_task(**given: Any) -> Task:
    """Makes a task that trains in a blink: 3 batches of 4 samples an epoch, one data set to test.

    Args:
        given: what of `Task` shall be something else.
    """
    values = {
        "model": lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3)),
        "loss": cross_entropy,
        "train_dataloader": tiny_batches(),
        "eval_dataloaders": {"test": tiny_batches(2)},
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "metrics": {"accuracy": MulticlassAccuracy(3)},
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
        observers, allowed, origin: see `TrainerBuilder`.
        settings: on the CPU, for one epoch, without checkpoints, unless given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").touch()  # the search for one upwards ends here
    chosen = {
        "device": "cpu",
        "max_duration": "1ep",
        "run_dir": folder / "run",
        "checkpoint_interval": None,
        "autoload": False,
    } | settings
    builder = TrainerBuilder(
        Configuration.read(chosen, environ={}, directory=folder),
        observers=observers,
        allowed=allowed,
        origin=origin,
    )
    given = tiny_task() if task is None else task
    return builder.build(given, algorithms=algorithms, callbacks=callbacks)


class Recorder:
    """A plugin of which `recorder` makes a class with hooks.

    Attributes:
        seen: the names of the hooks, as they are called.
    """

    name = "recorder"

    def __init__(self) -> None:
        self.seen: list[str] = []


def recorder(hooks: Iterable[str] = tuple(Event), name: str = "recorder") -> Recorder:
    """Makes a plugin whose `seen` lists hooks by name as they are called.

    Args:
        hooks: events and questions; all events unless given.
    """
    methods = {str(hook): hookimpl(_recording(str(hook))) for hook in hooks}
    kind = type("Recorder", (Recorder,), {"name": name, **methods})
    return cast("Recorder", kind())


def _recording(hook: str) -> Callable[..., None]:
    def record(self: Recorder, state: object) -> None:
        self.seen.append(hook)

    return record
