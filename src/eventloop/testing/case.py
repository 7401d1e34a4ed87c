"""A plugin under check: its runs, alone and with others, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from eventloop.diagnostics.check import Check, Finding
from eventloop.hooks import hookimpl
from eventloop.testing.runs import isolated_trainer

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin
    from eventloop.task import Task
    from eventloop.trainer import Trainer

Role = Literal["algorithm", "callback"]


class Run(NamedTuple):
    """What a run gave: weights, what was found, and who was called for each hook."""

    weights: dict[str, Tensor]
    findings: list[Finding]
    called: dict[str, list[str]]


@dataclass
class Case:
    """A plugin under check.

    Attributes:
        found: the plugin as trainers know it.
        is_resumed: whether a resumed run of one process was found to be one run.
    """

    plugin: type
    role: Role
    options: dict[str, Any]
    task: Callable[[], Task]
    folder: Path
    found: Plugin = field(init=False)
    is_resumed: bool = field(init=False, default=False)
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
            if trainer.state.eval_dataloaders:
                trainer.eval()
                trainer.predict(next(iter(trainer.state.eval_dataloaders.values())))
            called = {
                name: [one.plugin.name for one in ordered]
                for name, ordered in trainer.assembly.implementations.items()
            }
            return Run(weights_of(trainer), check.findings, called)


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

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def batch_end(self, state: Any) -> None:
        """Raises, when it is time."""
        if state.clock.batch == self.batch:
            raise ExpectedError


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
