"""Metrics: what they receive, and what they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.errors import TaskError

if TYPE_CHECKING:
    from torchmetrics import Metric


def is_metric(value: Any) -> bool:
    """Whether a value is a `torchmetrics.Metric`, or has what one has; doesn't import torchmetrics."""
    return not isinstance(value, type) and hasattr(value, "metric_state")


def predictions(outputs: Any) -> Any:
    """Returns what metrics receive: `outputs.logits` where it exists, else the outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def loss_in(outputs: Any) -> Any:
    """Returns the loss that outputs have themselves: `.loss`, or the key "loss"; None without."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def compute(metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
    """Computes metrics, each a tensor on its device; several results of one get dotted names.

    Raises:
        TaskError: a metric's result has something other than tensors.
    """
    results: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(value := metric.compute(), Mapping):
            results |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            results[name] = value
    for name, value in results.items():
        if not isinstance(value, Tensor):
            raise TaskError(f"metric {name!r} gave a {type(value).__name__}, not a tensor")
    return results
