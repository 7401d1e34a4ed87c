"""Everyday modes: a run in one call, fewer batches, the same batches, a dry run of everything.

Those that change what is trained on are plugins like any other, handed to
`Trainer(algorithms=[...])`; the flags of `eventloop fit` do no more.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.clock import Time
from eventloop.config.layers import example
from eventloop.config.settings import SETTING_NAMES
from eventloop.data.combine import FirstBatches
from eventloop.errors import SettingError
from eventloop.hook_markers import hookimpl
from eventloop.run.result import Result
from eventloop.task import Task
from eventloop.trainer import Trainer, TrainerBuilder
from eventloop.vocabulary import SETTINGS, TASK, TRAINER, known_as

if TYPE_CHECKING:
    from eventloop.config.settings import SettingValues
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.order import Implementation
    from eventloop.state import State

# Two batches show what the first alone doesn't; two epochs, what happens between epochs.
_DRY_BATCHES, _DRY_DURATION = 2, "2ep"


class LimitBatches:
    """Ends each epoch of training, and each evaluation, after so many batches.

    Args:
        train_batches: of an epoch of training; None for all.
        eval_batches: of each eval data loader; None for all.

    Raises:
        ValueError: a limit is less than one batch, or none is given.
    """

    name = "limit-batches"

    def __init__(
        self, *, train_batches: int | None = None, eval_batches: int | None = None
    ) -> None:
        _require_positive("LimitBatches", train_batches=train_batches, eval_batches=eval_batches)
        if train_batches is None and eval_batches is None:
            raise ValueError("LimitBatches() has no effect: give train_batches or eval_batches")
        self.train_batches, self.eval_batches = train_batches, eval_batches

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, Any]:
        dataloader = yield
        return _first(dataloader, self.train_batches)

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Mapping[str, Any], Any]:
        dataloaders = yield
        return {name: _first(one, self.eval_batches) for name, one in dataloaders.items()}


class Overfit:
    """Trains repeatedly on the same few batches, and evaluates on them.

    The batches are taken from the train data loader once, when the trainer is built; random
    changes to the data are frozen with them. The only eval data set is called "overfit": a correct
    model and loss reach the best values of its metrics.

    Args:
        batches: how many.

    Raises:
        ValueError: fewer than one.
    """

    name = "overfit"

    def __init__(self, *, batches: int) -> None:
        _require_positive("Overfit", batches=batches)
        self.batches = batches
        self._cached: list[Any] = []

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, list[Any]]:
        dataloader = yield
        self._cached = self._cached or list(itertools.islice(dataloader, self.batches))
        return self._cached

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Any, dict[str, Any]]:
        """Replaces the task's eval data with the same batches."""
        yield
        return {"overfit": self._cached}


class EveryBatch:
    """Runs implementations with `every=` at every batch; the observer of a dry run."""

    def observed(self, one: Implementation) -> Implementation:
        """Returns the implementation as it is called at every batch."""
        return one if one.every is None else replace(one, every=Time("1ba"))


def dry_run(
    task: object,
    *,
    algorithms: Sequence[object] = (),
    callbacks: Sequence[object] = (),
    observers: Sequence[Observer] = (),
    **settings: Unpack[SettingValues],
) -> Result:
    """Runs everything that a fit would run, over two epochs of two batches; leaves no file.

    Evaluation covers two batches of each set, a checkpoint is saved if a plugin can save one,
    and the weights are exported; all of that into a folder that is removed at the end.

    Args:
        task: as for `Trainer`, like everything else.

    Raises:
        BaseException: whatever a fit would raise.
    """
    with TemporaryDirectory(prefix="eventloop-dry-run-") as folder:
        values: Any = {**settings, **dry_settings(), "run_dir": folder}
        builder = TrainerBuilder(observers=[EveryBatch(), *observers])
        plugins = [*algorithms, dry_limit()]
        with builder.build(task, algorithms=plugins, callbacks=callbacks, **values) as trainer:
            return rehearse(trainer)


def dry_limit() -> LimitBatches:
    """Returns the limit of a dry run: two batches of everything."""
    return LimitBatches(train_batches=_DRY_BATCHES, eval_batches=_DRY_BATCHES)


def dry_settings() -> dict[str, str]:
    """Returns the settings of a dry run, which win over all others."""
    return {"max_duration": _DRY_DURATION, "log_interval": "1ba"}


def rehearse(trainer: Trainer) -> Result:
    """Fits, saves a checkpoint if a plugin can, and exports into the run's folder."""
    if trainer.assembly.asked("save_checkpoint"):
        trainer.state.request_checkpoint()
    result = trainer.fit()
    trainer.export(Path(trainer.state.run_dir, "dry-run.safetensors"))
    return result


def _first(dataloader: Any, limit: int | None) -> Any:
    if limit is None:
        return dataloader
    return FirstBatches(dataloader, limit)


def _require_positive(owner: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{owner}({name}={count!r}) isn't a number of batches, 1 or more")


_OF_TRAINER = ("algorithms", "callbacks")


def fit(
    model: nn.Module | Callable[[], nn.Module],
    train_dataloader: Any,
    *,
    optimizer: Callable[[nn.Module], Optimizer | Mapping[str, Optimizer]],
    max_duration: str | Time,
    loss: Callable[[Any, Any], Tensor] | None = None,
    **given: Any,
) -> Result:
    """Trains a model: `Trainer(Task(...), ...).fit()` in one call, for what needs no second one.

    Args:
        model, train_dataloader, optimizer, loss: see `Task`.
        max_duration: how long to train, as a time: "10ep", "5000ba".
        given: more values of `Task`, such as `eval_dataloaders` and `metrics`, and settings,
            `algorithms` and `callbacks` of `Trainer`.

    Raises:
        EventloopError: as `Trainer` and `Trainer.fit` do.
    """
    if "settings" in given:
        raise SettingError(
            "settings are keywords here", fix='write fit(..., seed=1) for {"seed": 1}'
        )
    names = inspect.signature(Task).parameters.keys() - {*_OF_TRAINER}
    settings = {word: example(*one, "keyword") for word, one in SETTINGS.items()}
    words = {**settings, **TRAINER, **TASK}
    for name in given.keys() - names - {*_OF_TRAINER, *SETTING_NAMES}:
        if hint := known_as(name, words, [*names, *_OF_TRAINER, *SETTING_NAMES]):
            raise SettingError(
                f"fit(...) has no argument {name!r}{hint}", fix="rename the keyword or leave it out"
            )
    of_task = {name: given.pop(name) for name in names & given.keys()}
    task = Task(
        model=model, train_dataloader=train_dataloader, optimizer=optimizer, loss=loss, **of_task
    )
    with Trainer(task, max_duration=max_duration, **given) as trainer:
        return trainer.fit()
