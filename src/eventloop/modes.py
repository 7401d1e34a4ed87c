"""Everyday modes: fewer batches, the same batches, and a dry run of everything.

Each is a plugin like any other, handed to `Trainer(algorithms=[...])`; the flags of
`eventloop fit` do no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from eventloop.clock import Time
from eventloop.data.combine import FirstBatches, known_length
from eventloop.hooks import hookimpl
from eventloop.run.result import Result
from eventloop.trainer import Trainer, TrainerBuilder

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
        self.train_batches = train_batches
        self.eval_batches = eval_batches

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, Any]:
        """Leaves the first batches of an epoch."""
        dataloader = yield
        return _first(dataloader, self.train_batches)

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Mapping[str, Any], Any]:
        """Leaves the first batches of each eval data loader."""
        dataloaders = yield
        return {name: _first(one, self.eval_batches) for name, one in dataloaders.items()}


class Overfit:
    """Trains on the same few batches again and again, and evaluates on them.

    The batches are taken from the train data loader once, when the trainer is built; random
    changes to the data are frozen with them. The only eval data set is called "overfit": a model
    and loss without a mistake bring its metrics to their best.

    Args:
        batches: how many.

    Raises:
        ValueError: fewer than one.
    """

    name = "overfit"

    def __init__(self, *, batches: int) -> None:
        _require_positive("Overfit", batches=batches)
        self.batches = batches
        self._kept: list[Any] = []

    @hookimpl(wrapper=True, tryfirst=True)
    def build_train_dataloader(self, state: State) -> Generator[None, Any, list[Any]]:
        """Keeps the first batches, and gives them in each epoch."""
        dataloader = yield
        self._kept = self._kept or list(itertools.islice(dataloader, self.batches))
        return self._kept

    @hookimpl(wrapper=True, tryfirst=True)
    def build_eval_dataloaders(self, state: State) -> Generator[None, Any, dict[str, Any]]:
        """Puts the same batches in the place of the task's eval data."""
        yield
        return {"overfit": self._kept}


class Sooner:
    """Lets implementations with `every=` run at every batch; the observer of a dry run."""

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
        builder = TrainerBuilder(observers=[Sooner(), *observers])
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
    return FirstBatches(dataloader, limit, known_length(dataloader))


def _require_positive(owner: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ValueError(f"{owner}({name}={count!r}) isn't a number of batches, 1 or more")
