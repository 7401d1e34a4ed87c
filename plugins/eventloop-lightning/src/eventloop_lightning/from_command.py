"""A LightningModule as a task: for `eventloop fit eventloop_lightning`, and for scripts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType

from eventloop import SettingError, State
from eventloop_lightning.accelerator import take_device
from eventloop_lightning.task import LightningTask
from eventloop_lightning.trainer import Trainer


def task(
    module: Any,
    data: Any = None,
    *,
    callbacks: list[Any] | None = None,
    accumulate_grad_batches: int = 1,
    log_every_n_steps: int = 50,
    num_sanity_val_steps: int = 2,
    leave_out: list[str] | None = None,
) -> LightningTask:
    """Returns the task that trains a LightningModule.

    eventloop's settings say how to train: max_duration, clip_norm, eval_interval.

    Args:
        module: a LightningModule, its class, or an import path, my.module:LitModel.
        data: a LightningDataModule in the same forms; not set: the module's own data loaders.
        callbacks: callbacks of Lightning, or their import paths.
        accumulate_grad_batches: number of batches per step.
        log_every_n_steps: how often numbers of a step are logged.
        num_sanity_val_steps: number of batches to validate before training.
        leave_out: keys that on_save_checkpoint adds and that the run's checkpoints leave out, such
            as objects.
    """
    module_or_maker = _imported(module)
    trainer = Trainer(
        logger=False,
        callbacks=[_instance(_imported(callback)) for callback in callbacks or ()],
        accumulate_grad_batches=accumulate_grad_batches,
        log_every_n_steps=log_every_n_steps,
        num_sanity_val_steps=num_sanity_val_steps,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def attach(lightning_module: LightningModule, state: State) -> None:
        datamodule = None if data is None else _instance(_imported(data))
        if datamodule is not None and not isinstance(datamodule, LightningDataModule):
            raise SettingError(
                f"data={data!r} is not a LightningDataModule",
                fix="name one, or leave it out and let the module have train_dataloader",
            )
        _take_settings(trainer, state)
        trainer.loggers = [
            DummyLogger()
        ]  # some callbacks require a logger; eventloop's loggers get the numbers
        trainer.strategy._lightning_module = lightning_module
        trainer.state.fn = TrainerFn.FITTING
        trainer.state.status = TrainerStatus.RUNNING
        trainer.training = True
        trainer._data_connector.attach_data(lightning_module, datamodule=datamodule)

    return LightningTask(
        trainer, lambda: _instance(module_or_maker), attach, leave_out=leave_out or ()
    )


def _take_settings(trainer: Any, state: State) -> None:
    """Applies eventloop's settings to Lightning's trainer."""
    settings = state.settings
    loop = trainer.fit_loop
    duration = settings.max_duration
    loop.max_epochs = int(duration.value) if duration and duration.unit == "ep" else -1
    _take_clipping(trainer, settings.clip_norm, settings.clip_value)
    if state.precision.name == "bf16":
        trainer.strategy.precision_plugin = MixedPrecision("bf16-mixed", state.device.type)
    take_device(trainer.strategy, state.device)
    interval = settings.eval_interval
    if interval is None:
        trainer.limit_val_batches = 0
    elif interval.unit == "ep" and float(interval.value).is_integer():
        trainer.check_val_every_n_epoch = int(interval.value)
    elif interval.unit == "ba":
        trainer.check_val_every_n_epoch = None
        trainer.val_check_interval = int(interval.value)


def _take_clipping(trainer: Any, norm: float | None, value: float | None) -> None:
    if norm is not None and value is not None:
        raise SettingError(
            "clip_norm and clip_value can't both be: a LightningModule clips in one way",
            fix="leave one of them out, or clip in configure_gradient_clipping",
        )
    trainer.gradient_clip_val = norm if value is None else value
    kind = GradClipAlgorithmType.NORM if value is None else GradClipAlgorithmType.VALUE
    trainer.gradient_clip_algorithm = None if trainer.gradient_clip_val is None else kind


def _imported(target: Any) -> Any:
    """Imports the object that a text names, `my.module:Name`; returns anything else unchanged."""
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    if not name:
        raise SettingError(
            f"{target!r} names no class", fix="write it as my.module:Name, module and class"
        )
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"{target!r} isn't there: {error}", fix="write my.module:Name"
        ) from error


def _instance(target: Any) -> Any:
    """Calls a class or function without arguments; returns an object unchanged."""
    is_maker: Callable[..., Any] | bool = isinstance(target, type) or (
        callable(target) and not isinstance(target, LightningModule)
    )
    return target() if is_maker else target
