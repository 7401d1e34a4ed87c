"""The metrics that a task gives: a fresh copy for each data set, on the device.

Imported where there are some, for torchmetrics takes as long to import as torch does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from eventloop.data import num_samples
from eventloop.errors import TaskError, a

if TYPE_CHECKING:
    from eventloop.state import State


def fresh_metrics(metrics: Any, device: torch.device) -> dict[str, Metric]:
    """Copies metrics to a device, with nothing counted yet.

    Args:
        metrics: a mapping by name, a `MetricCollection`, one metric (named after its class), or a
            factory of any of these.

    Raises:
        TaskError: something in it isn't a torchmetrics metric.
    """
    if not isinstance(metrics, (Metric, MetricCollection, Mapping)) and callable(metrics):
        metrics = metrics()
    if isinstance(metrics, Metric):
        metrics = {type(metrics).__name__.lower(): metrics}
    result = {}
    for name, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise TaskError(
                f"metric {name!r} is {a(type(metric).__name__)}, not a torchmetrics.Metric",
                fix="give Task(metrics={'accuracy': MulticlassAccuracy(10)})",
            )
        result[str(name)] = copy.deepcopy(metric).to(device)
        result[str(name)].reset()
    return result


class MeanLoss(Metric):
    """The mean of a task's loss over samples, added up on the device.

    Args:
        loss: gives the loss of the batch under way, shape ().
        state: where that batch stands.
    """

    higher_is_better = False
    total: Tensor
    num_samples: Tensor

    def __init__(self, loss: Callable[[], Tensor], state: State) -> None:
        super().__init__()
        self._loss = loss
        self._state = state
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("num_samples", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.to(state.device)

    def update(self, *_: Any) -> None:
        """Adds the batch under way; outputs and targets are read where the loss reads them."""
        samples = num_samples(self._state.batch)
        self.total += self._loss().detach() * samples
        self.num_samples += samples

    def compute(self) -> Tensor:
        """Returns the mean, shape ()."""
        return self.total / self.num_samples
