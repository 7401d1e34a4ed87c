"""Copies a task's metrics for each data set, onto the device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from eventloop.errors import TaskError, a
from eventloop.training.mean_metrics import MeanOf
from eventloop.training.metrics import is_metric
from eventloop.training.target_shapes import watched_once

if TYPE_CHECKING:
    from torchmetrics import Metric

    from eventloop.state import State


def fresh_metrics(metrics: Any, state: State) -> dict[str, Metric | MeanOf | None]:
    """Creates metrics on the State's device, without updates yet.

    Args:
        metrics: a mapping by name, a `MetricCollection`, one metric (named after its class or
            function), or a factory of any of these. A metric is a `torchmetrics.Metric`, or a
            function of outputs and targets, averaged over the samples. `loss: None` is kept: the
            loss isn't measured.

    Raises:
        TaskError: an entry is neither.
    """
    if isinstance(metrics, list | tuple):
        raise TaskError(
            f"the task's metrics are {a(type(metrics).__name__)} of {len(metrics)}, without names",
            fix="name them: {'accuracy': MulticlassAccuracy(10)}",
        )
    named = (Mapping, nn.ModuleDict)  # a `MetricCollection`
    is_whole = isinstance(metrics, named) or is_metric(metrics)
    if not is_whole and callable(metrics) and _takes(metrics):
        metrics = metrics()
    if not isinstance(metrics, named):
        kind = type(metrics).__name__.lower() if is_metric(metrics) else "metric"
        metrics = {getattr(metrics, "__name__", kind): metrics}
    return {str(name): _fresh(str(name), metric, state) for name, metric in metrics.items()}


def _fresh(name: str, metric: Any, state: State) -> Metric | MeanOf | None:
    if metric is None and name == "loss":
        return None
    if is_metric(metric):
        fresh: Metric = copy.deepcopy(metric).to(state.device)
        fresh.reset()
        return fresh
    if callable(metric) and not isinstance(metric, type) and _takes(metric, None, None):
        is_higher = getattr(metric, "higher_is_better", None)
        what = f"metric {name!r}"
        return MeanOf(what, watched_once(metric, what), state, is_higher=is_higher)
    if isinstance(metric, type):
        raise TaskError(
            f"metric {name!r} is the class {metric.__name__}, not an instance of it",
            fix=f"write {metric.__name__}()",
        )
    raise TaskError(
        f"metric {name!r} is {a(type(metric).__name__)}, neither a torchmetrics.Metric nor a "
        "function of outputs and targets",
        fix="give Task(metrics={'accuracy': MulticlassAccuracy(10)}), or "
        "Task(metrics={'error': lambda outputs, targets: (outputs - targets).abs().mean()})",
    )


def _takes(function: Callable[..., Any], *args: None) -> bool:
    """Returns whether a function can be called with these many arguments, if that is known."""
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # written in C
        return True
    except TypeError:
        return False
    return True
