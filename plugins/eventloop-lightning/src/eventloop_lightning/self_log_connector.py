"""What becomes of the numbers of `self.log`: Lightning's connector, without detours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from torch import Tensor

from eventloop import State


class Connector(_LoggerConnector):
    """Hands what Lightning's loggers get to eventloop's, too.

    Attributes:
        state: of the run; None outside of a fit.
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

    What the connector's own methods do, with the collection of training at hand and nothing done
    where nothing was logged: they look for the loop that runs several times a batch.

    Args:
        trainer: Lightning's.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._loop = trainer.fit_loop.epoch_loop
        self._results = self._loop._results

    def begin(self, batch: Any) -> None:
        """Keeps the batch, of which the size is a number's weight."""
        connector = self._connector
        results = self._results
        connector._first_loop_iter = connector._first_loop_iter is None
        results.batch = batch
        results.batch_size = None
        results.dataloader_idx = None

    def end(self) -> None:
        """Has callbacks see what was logged, as it is now."""
        connector = self._connector
        results = self._results
        if results:
            metrics = results.metrics(on_step=True)
            connector._progress_bar_metrics.update(metrics["pbar"])
            connector._callback_metrics.update(metrics["callback"])
            connector._logged_metrics.update(metrics["log"])
        results.batch = results.batch_size = None

    def deliver(self) -> None:
        """Hands the numbers of a step to the loggers, every so many steps."""
        trainer = self._trainer
        interval = self._trainer.log_every_n_steps
        is_due = interval and not (self._loop._batches_that_stepped + 1) % interval
        if is_due or trainer.should_stop or trainer.fast_dev_run:
            self._connector.update_train_step_metrics()
