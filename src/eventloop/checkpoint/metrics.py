"""What metrics have counted so far, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchmetrics import Metric


def counts_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Gives what this rank's metrics have counted, by their names and those of their parts."""
    return {
        name: {"num_updates": one.update_count, "values": dict(one.metric_state)}
        for name, one in _parts(metrics)
    }


def put_counts(metrics: Mapping[str, Metric], counts: Mapping[str, Any]) -> None:
    """Lets metrics go on from what `counts_of` gave; those that it doesn't know stay empty."""
    for name, one in _parts(metrics):
        if name not in counts:
            continue
        for field, value in counts[name]["values"].items():
            placed = [part.to(one.device) for part in value] if isinstance(value, list) else value
            setattr(one, field, placed if isinstance(placed, list) else placed.to(one.device))
        # Private: torchmetrics has no public way to set it (1.9).
        one._update_count = counts[name]["num_updates"]


def _parts(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Gives the metrics and those that they are made of, with their names."""
    if not metrics:
        return
    from torchmetrics import Metric  # where there are none it needn't be imported

    for name, metric in metrics.items():
        for path, one in metric.named_modules():
            if isinstance(one, Metric):
                yield f"{name}.{path}".rstrip("."), one
