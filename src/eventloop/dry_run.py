"""A dry run: two short epochs of everything that a fit does, which leave no file."""

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

# Two batches show what the first alone doesn't; two epochs, what happens between epochs.
_DRY_BATCHES = 2
_DRY_DURATION = "2ep"


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
