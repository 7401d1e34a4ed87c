"""The stages of a fit: the work of Lightning's trainer before, between and after its epochs.

They call Lightning's own functions one by one, in Lightning's order; the names are private, from
lightning 2.6.6.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.loops.utilities import _parse_loop_limits
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.parsing import clean_namespace
from lightning.pytorch.utilities.seed import isolate_rng

from eventloop_lightning.checkpoint_state import Keeping
from eventloop_lightning.hook_calls import HookCalls


def set_up(trainer: Any, module: LightningModule) -> None:
    """Prepares data, module and callbacks: the steps before `configure_optimizers`."""
    loop = trainer.fit_loop
    loop.min_epochs, loop.max_epochs = _parse_loop_limits(
        trainer.min_steps, trainer.max_steps, trainer.min_epochs, trainer.max_epochs, trainer
    )
    clean_namespace(module.hparams)
    trainer.strategy.connect(module)
    trainer._callback_connector._attach_model_callbacks()
    trainer._callback_connector._attach_model_logging_functions()
    _verify_loop_configurations(trainer)
    trainer.strategy.setup_environment()
    trainer._data_connector.prepare_data()
    call._call_setup_hook(trainer)
    call._call_configure_model(trainer)
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()


def begin(trainer: Any, keeping: Keeping) -> None:
    """Calls `on_fit_start`, runs the sanity check, and calls `on_train_start` if there is a first epoch."""
    call._call_callback_hooks(trainer, "on_fit_start")
    call._call_lightning_module_hook(trainer, "on_fit_start")
    if trainer.enable_autolog_hparams:
        _log_hyperparams(trainer)
    trainer.lightning_module.zero_grad()
    keeping.put_training()
    loop = trainer.fit_loop
    loop.runs = True
    if not keeping.is_resumed:
        with isolate_rng():
            trainer._run_sanity_check()
        loop.runs = not loop.skip
    if loop.runs:
        loop.on_run_start()


def begin_epoch(loop: Any) -> None:
    """Resets the counters of batches."""
    loop.batch_progress.reset_on_run()
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()


def move_schedulers(loop: Any, *, of_step: bool = True) -> None:
    """Steps the schedulers per step, and at the last batch also the schedulers per epoch."""
    if loop.trainer.lr_scheduler_configs:
        if of_step:
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def is_validation_due(loop: Any) -> bool:
    """Whether Lightning's loop would validate after this batch."""
    trainer = loop.trainer
    progress = loop.batch_progress
    is_timed = trainer._val_check_time_interval is not None
    if not (is_timed or progress.is_last_batch or trainer.should_stop):
        is_over_epochs = trainer.check_val_every_n_epoch is None
        number = (progress.total if is_over_epochs else progress.current).ready
        if number % trainer.val_check_batch:
            return False
    return bool(loop._should_check_val_fx(None))


def end_advance(loop: Any, *, accumulates: bool) -> None:
    """Finishes a batch after its validation."""
    if loop.trainer.lr_scheduler_configs:
        loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    if not accumulates:
        loop._batches_that_stepped += 1
    if loop.trainer.should_stop:
        loop._save_loggers_on_train_batch_end()


def end_epoch(trainer: Any, calls: HookCalls) -> None:
    """Calls `on_train_epoch_end`, and finishes the epoch."""
    fit_loop = trainer.fit_loop
    connector = trainer._logger_connector
    loop = fit_loop.epoch_loop
    connector.epoch_end_reached()
    fit_loop.epoch_progress.increment_processed()
    calls.tell_epoch_end()
    connector.on_epoch_end()
    if loop._num_ready_batches_reached():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    # Loggers get the numbers of an epoch at the step of its last batch.
    loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    loop._batches_that_stepped += 1
    fit_loop.epoch_progress.increment_completed()


def is_done(trainer: Any) -> bool:
    """Whether Lightning's loop would end now, regardless of epochs, which eventloop counts."""
    loop = trainer.fit_loop
    epoch_loop = loop.epoch_loop
    if epoch_loop.max_steps != -1 and epoch_loop.global_step >= epoch_loop.max_steps:
        return True
    return bool(trainer.should_stop and loop._can_stop_early)


def finish(trainer: Any) -> None:
    """Calls `on_train_end`, `on_fit_end` and `teardown`."""
    if trainer.fit_loop.runs:
        trainer.fit_loop.on_run_end()
    trainer._teardown()
    call._call_callback_hooks(trainer, "on_fit_end")
    call._call_lightning_module_hook(trainer, "on_fit_end")
    call._call_teardown_hook(trainer)
    trainer.state.status = TrainerStatus.FINISHED
    trainer.state.stage = None
