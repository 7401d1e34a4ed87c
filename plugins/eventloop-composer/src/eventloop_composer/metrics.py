"""Metrics of a model of Composer: training metrics, and the selection for an eval set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from composer.utils import model_eval_mode
from torchmetrics import Metric

from eventloop import State, hookimpl
from eventloop_composer.session import Session


def chosen_metrics(
    metrics: Mapping[str, Metric], patterns: Sequence[str] | None
) -> dict[str, Metric]:
    """Returns copies of the metrics whose name matches a pattern; all metrics if `patterns` is None."""
    return {
        name: deepcopy(metric)
        for name, metric in metrics.items()
        if patterns is None
        or any(re.match(f".*{pattern}.*", name, re.IGNORECASE) for pattern in patterns)
    }


class TrainMetrics:
    """Computes metrics in training as Composer's trainer does: per batch, in evaluation mode.

    Args:
        session: the session; Composer's State has the metrics.
        is_needed: whether the model has training metrics.

    Attributes:
        hooks: names of the hooks for the task.
    """

    def __init__(self, session: Session, is_needed: bool) -> None:
        self.hooks = ("before_train_batch", "before_forward", "after_backward") if is_needed else ()
        self._session = session
        self._batch: Any = None

    @hookimpl(tryfirst=True)
    def before_train_batch(self, state: State) -> None:
        """Resets the metrics."""
        for metric in self._metrics().values():
            metric.reset()

    @hookimpl(tryfirst=True)
    def before_forward(self, state: State) -> None:
        """Stores the microbatch before algorithms change it."""
        self._batch = deepcopy(state.microbatch)

    @hookimpl(trylast=True)
    def after_backward(self, state: State) -> None:
        """Updates the metrics with the outputs of the microbatch."""
        batch = self._batch
        self._batch = None
        model: Any = state.model
        with torch.no_grad(), model_eval_mode(state.wrapped_model):
            cast = state.precision.under_autocast(model.eval_forward)
            outputs = cast(batch, state.outputs)
            for metric in self._metrics().values():
                model.update_metric(batch, outputs, metric.to(state.device))

    def end_batch(self) -> None:
        """Computes and logs the metrics, if Composer's loggers or callbacks may read them."""
        mirror = self._session.mirror
        metrics = self._metrics()
        if mirror.theirs.train_metrics is None or not self._session.is_watched:
            return
        values = {name: metric.compute() for name, metric in metrics.items()}
        mirror.theirs.train_metric_values.update(values)
        mirror.logs.log({f"metrics/train/{name}": value for name, value in values.items()})

    def _metrics(self) -> Mapping[str, Metric]:
        return self._session.mirror.theirs.train_metrics or {}
