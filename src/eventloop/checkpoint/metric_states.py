"""What metrics have counted so far, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric


def counts_of(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Gives what this rank's metrics have counted, by their names and those of their parts."""
    return {
        name: {"num_updates": one.update_count, "values": dict(one.metric_state)}
        for name, one in _parts(metrics)
    }


def put_counts(metrics: Mapping[str, Metric], counts: Mapping[str, Any]) -> None:
    """Has metrics go on from what `counts_of` returned; those that it doesn't know stay empty.

    Raises:
        ValueError, LookupError: it isn't what these metrics count.
    """
    for name, one in _parts(metrics):
        if name not in counts:
            continue
        values = counts[name]["values"]
        for field, fresh in dict(one.metric_state).items():
            setattr(one, field, _placed(values[field], fresh, f"{name}.{field}", one.device))
        # Private: torchmetrics has no public way to set it (1.9).
        one._update_count = counts[name]["num_updates"]


def _placed(
    value: Any, fresh: Tensor | list[Tensor], name: str, device: torch.device
) -> Tensor | list[Tensor]:
    """Returns what was counted, on the device.

    Args:
        fresh: what the metric has counted of nothing.

    Raises:
        ValueError: it isn't of that kind.
    """
    if isinstance(fresh, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is a tensor, not a list of them")
        return [part.to(device) for part in value]
    if not isinstance(value, Tensor) or not _fits(value, fresh):
        raise ValueError(f"{name} isn't a tensor of shape {tuple(fresh.shape)}")
    return value.to(device)


def _fits(value: Tensor, fresh: Tensor) -> bool:
    """Whether a count may have come of a fresh one, to which batches are added."""
    if fresh.numel() == 0:
        return True
    try:
        shape = torch.broadcast_shapes(value.shape, fresh.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return shape == value.shape and value.is_complex() == fresh.is_complex()


def _parts(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Gives the metrics and those that they are made of, with their names."""
    if not metrics:
        return
    from torchmetrics import Metric  # where there are none it needn't be imported

    for name, metric in metrics.items():
        for path, one in metric.named_modules():
            if isinstance(one, Metric):
                yield f"{name}.{path}".rstrip("."), one
