"""The end of a trainer's steps and epochs, and its counts within an epoch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.utils import logging

# The logger of transformers' trainer, so that `log_level` counts.
logger = logging.get_logger("transformers.trainer")


class StepEnd:
    """Ends steps and epochs as a trainer does.

    Args:
        trainer: the trainer whose methods are called.
        fit: the objects that the trainer has prepared.

    Attributes:
        step: position of the last batch in its epoch; -1 at first.
        grad_norm: gradient norm of the last step.
        learning_rate: learning rate of the last step.
    """

    def __init__(self, trainer: Any, fit: Any) -> None:
        self._trainer = trainer
        self._fit = fit
        self._filters = trainer.args.logging_nan_inf_filter
        self.begin_epoch()

    def begin_epoch(self, num_skipped: int = 0) -> None:
        """Resets the counts of the previous epoch.

        Args:
            num_skipped: number of batches of this epoch that are skipped.
        """
        self.step = num_skipped - 1
        self.grad_norm: Any = None
        self.learning_rate: float | None = None

    def add(self, loss: Tensor) -> None:
        """Adds a batch's loss to the next logged loss; a loss that isn't finite counts as the mean so far.

        The trainer's own loop reads each loss on the host; here the device itself selects the value.
        """
        trainer = self._trainer
        total = self._trainer._tr_loss
        self.step += 1
        if total.device != loss.device:
            raise ValueError(
                f"the loss is on {loss.device}, and those before were on {total.device}"
            )
        if self._filters:
            num = 1 + trainer.state.global_step - trainer._globalstep_last_logged
            loss = torch.where(torch.isfinite(loss), loss, total / num)
        total += loss

    def move_rate(self) -> None:
        """Steps the scheduler, unless it monitors a metric."""
        scheduler = self._trainer.lr_scheduler
        if not isinstance(scheduler, ReduceLROnPlateau | GreedyLR):
            scheduler.step()

    def end_step(self, epoch: int) -> None:
        """Counts a step and calls `on_step_end`; then the trainer logs, evaluates and saves."""
        trainer = self._trainer
        trainer.state.global_step += 1
        trainer.state.epoch = epoch + (self.step + 1) / self._fit.steps_in_epoch
        handler = trainer.callback_handler
        trainer.control = handler.on_step_end(trainer.args, trainer.state, trainer.control)
        self._log_save_evaluate(epoch)

    def end_epoch(self, epoch: int) -> None:
        """Calls `on_epoch_end`; then the trainer logs, evaluates and saves."""
        trainer = self._trainer
        handler = trainer.callback_handler
        trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self._log_save_evaluate(epoch)

    def stop_without_data(self) -> None:
        """Stops a run whose data has ended."""
        trainer = self._trainer
        logger.warning(
            f"The data gave no batch, so training stops at step {trainer.state.global_step} of "
            f"{trainer.state.max_steps}."
        )
        trainer.control.should_training_stop = True

    def _log_save_evaluate(self, epoch: int) -> None:
        trainer = self._trainer
        fit = self._fit
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            self.grad_norm,
            fit.model,
            fit.trial,
            epoch,
            fit.ignore_keys,
            fit.start_time,
            learning_rate=self.learning_rate,
        )
