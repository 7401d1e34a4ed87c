"""Copies a task's metrics for each data set, onto the device.

Imported only for a task with metrics, as importing torchmetrics takes as long as torch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchmetrics import Metric, MetricCollection

from eventloop.errors import TaskError, a
from eventloop.training.mean_metrics import MeanOf
from eventloop.training.target_shapes import watched_once

if TYPE_CHECKING:
    from eventloop.state import State


def fresh_metrics(metrics: Any, state: State) -> dict[str, Metric | None]:
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
    if not isinstance(metrics, (Metric, MetricCollection, Mapping)) and _is_factory(metrics):
        metrics = metrics()
    if isinstance(metrics, Metric):
        metrics = {type(metrics).__name__.lower(): metrics}
    elif not isinstance(metrics, Mapping | MetricCollection):
        metrics = {getattr(metrics, "__name__", "metric"): metrics}
    return {str(name): _fresh(str(name), metric, state) for name, metric in metrics.items()}


def _fresh(name: str, metric: Any, state: State) -> Metric | None:
    if metric is None and name == "loss":
        return None
    if isinstance(metric, Metric):
        fresh = copy.deepcopy(metric).to(state.device)
        fresh.reset()
        return fresh
    if callable(metric) and not isinstance(metric, type) and _takes_two(metric):
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


def _takes_two(function: Callable[..., Any]) -> bool:
    """Returns whether a function can be called with outputs and targets, if that is known."""
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # written in C
        return True
    except TypeError:
        return False
    return True


def _is_factory(metrics: Callable[..., Any]) -> bool:
    """Returns whether a callable takes no arguments; a metric takes outputs and targets."""
    if not callable(metrics):
        return False
    try:
        parameters = inspect.signature(metrics).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return not any(one.kind in kinds and one.default is one.empty for one in parameters)
