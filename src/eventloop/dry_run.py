"""A dry run: two short epochs of everything that a fit does, without leaving files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack

from eventloop.batch_limits import LimitBatches
from eventloop.clock import Time
from eventloop.run.result import Result
from eventloop.trainer import Trainer, TrainerBuilder

if TYPE_CHECKING:
    from eventloop.config.settings import SettingValues
    from eventloop.plugin.observe import Observer
    from eventloop.plugin.order import Implementation

# Two batches, because some errors occur only after the first; two epochs, to run the code between them.
_DRY_BATCHES = 2
_DRY_DURATION = "2ep"


class EveryBatch:
    """Runs implementations with `every=` at every batch; the observer of a dry run."""

    def observed(self, implementation: Implementation) -> Implementation:
        """Returns the implementation with its interval replaced by a batch, if it has one."""
        return (
            implementation
            if implementation.every is None
            else replace(implementation, every=Time("1ba"))
        )


def dry_run(
    task: object,
    *,
    algorithms: Sequence[object] = (),
    callbacks: Sequence[object] = (),
    observers: Sequence[Observer] = (),
    **settings: Unpack[SettingValues],
) -> Result:
    """Runs everything that a fit would run, over two epochs of two batches, without leaving files.

    Each set is evaluated on two batches, a checkpoint is saved if a plugin can save it, and the
    weights are exported. All files are written to a folder that is removed at the end.

    Args:
        task: as for `Trainer`, like all other arguments.

    Raises:
        BaseException: any exception that a fit would raise.
    """
    with TemporaryDirectory(prefix="eventloop-dry-run-") as folder:
        values: Any = {**settings, **dry_settings(), "run_dir": folder}
        builder = TrainerBuilder(observers=[EveryBatch(), *observers])
        plugins = [*algorithms, dry_limit()]
        with builder.build(task, algorithms=plugins, callbacks=callbacks, **values) as trainer:
            return rehearse(trainer)


def dry_limit() -> LimitBatches:
    """Returns the plugin that limits training and evaluation to two batches."""
    return LimitBatches(train_batches=_DRY_BATCHES, eval_batches=_DRY_BATCHES)


def dry_settings() -> dict[str, str]:
    """Returns the settings of a dry run, which take precedence over all others."""
    return {"max_duration": _DRY_DURATION, "log_interval": "1ba"}


def rehearse(trainer: Trainer) -> Result:
    """Fits, saves a checkpoint if a plugin can, and exports into the run's folder."""
    if trainer.assembly.asked("save_checkpoint"):
        trainer.state.request_checkpoint()
    result = trainer.fit()
    trainer.export(Path(trainer.state.run_dir, "dry-run.safetensors"))
    return result
