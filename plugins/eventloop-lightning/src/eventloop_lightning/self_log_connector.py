"""Delivers the numbers of `self.log`: Lightning's connector, with less work per batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torch import Tensor

from eventloop import State


class Connector(_LoggerConnector):
    """Also passes the numbers for Lightning's loggers to eventloop's loggers.

    Attributes:
        state: the run's state; None outside of a fit.
    """

    state: State | None = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs the numbers of a step, an epoch or a validation."""
        super().log_metrics(metrics, step)
        if self.state is not None:
            for name, value in metrics.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    self.state.log(name, value)


class BatchNumbers:
    """Notifies Lightning's logger connector at the start and the end of each batch.

    The connector's own methods search for the active loop several times a batch; these use the training
    results directly, and return early if nothing was logged.

    Args:
        trainer: Lightning's trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._results = self._loop._results

    def begin(self, batch: Any) -> None:
        """Stores the batch, whose size is the weight of logged numbers."""
        connector = self._connector
        results = self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch = batch
        results.batch_size = None
        results.dataloader_idx = None

    def end(self) -> None:
        """Updates the metrics that callbacks see."""
        connector = self._connector
        results = self._results
        if results:
            metrics = results.metrics(on_step=True)
            connector._progress_bar_metrics.update(metrics["pbar"])
            connector._callback_metrics.update(metrics["callback"])
            connector._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None

    def deliver(self) -> None:
        """Passes the numbers of a step to the loggers, every `log_every_n_steps` steps."""
        trainer = self._trainer
        interval = self._trainer.log_every_n_steps
        is_due = interval and not (self._loop._batches_that_stepped + 1) % interval
        if is_due or trainer.should_stop or trainer.fast_dev_run:
            self._connector.update_train_step_metrics()
