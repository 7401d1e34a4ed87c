"""The numbers of `self.log` in training: Lightning's collection, made savable in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule

# Private: the collection in which Lightning's loops store numbers (lightning 2.6.6).
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

# Options of a logged number, except for its reduction, which is stored by name.
_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_REDUCE = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


class Results(_ResultCollection):
    """The numbers of an epoch, by hook and name.

    Args:
        reduce: reduces a tensor over the ranks.
    """

    def __init__(self, reduce: Callable[..., Any]) -> None:
        super().__init__(training=True)
        self._reduce = reduce
        self._given: dict[str, Mapping[str, Any]] = {}

    def log(
        self, fx: str, name: str, value: Any, *, batch_size: int | None = None, **options: Any
    ) -> None:
        """Adds a value to the numbers of its hook.

        A value logged with the same options as before is added to its sum directly: Lightning would build
        its metadata again, and search the sum for tensors to move.
        """
        key = f"{fx}.{name}"
        metric = self.get(key)
        if metric is None or self._given.get(key) != options or not _is_like(value, metric):
            super().log(fx, name, value, batch_size=batch_size, **options)
            self._given[key] = options
            return
        size = self._extract_batch_size(metric, batch_size, metric.meta)
        metric.forward(value if options["enable_graph"] else value.detach(), size)
        metric.has_reset = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of the current epoch; the module saves its own metrics."""
        return {key: _taken(metric) for key, metric in self.items()}

    def load_state_dict(self, state: Mapping[str, Any], module: LightningModule) -> None:
        """Restores sums from `state_dict`; metrics of the module are looked up in `module`."""
        for key, saved in state.items():
            self[key] = _made(saved, self._reduce, module)


def _is_like(value: Any, metric: Any) -> bool:
    """Whether a value is a tensor on the device of its sum."""
    is_tensor = isinstance(value, Tensor) and metric.is_tensor
    return is_tensor and value.device == metric.value.device


def _taken(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    sync = metric.meta.sync
    # Lightning accepts only these reductions: torch's and Python's functions, and their names.
    names = [name for name in _REDUCE if getattr(meta, f"is_{name}_reduction")]
    return {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": names[0],
        "sync": {"should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "is_tensor": metric.is_tensor,
        "values": {name: getattr(metric, name) for name in _values_of(metric)},
        "has_reset": metric.has_reset,
        "updates": metric._update_count,
    }


def _made(
    saved: Mapping[str, Any], reduce: Callable[..., Any], module: LightningModule
) -> _ResultMetric:
    meta = _Metadata(**saved["meta"], reduce_fx=_REDUCE[saved["reduce"]])
    sync = saved["sync"]
    meta.sync = _Sync(_should=sync["should"], fn=reduce, rank_zero_only=sync["rank_zero_only"])
    metric = _ResultMetric(meta, is_tensor=saved["is_tensor"])
    if not metric.is_tensor:
        metric.value = module.get_submodule(meta.metric_attribute)
    for name, value in saved["values"].items():
        setattr(metric, name, value)
    metric.has_reset = saved["has_reset"]
    metric._update_count = saved["updates"]
    return metric


def _values_of(metric: Any) -> list[str]:
    if not metric.is_tensor:
        return ["_forward_cache"]
    means = ["cumulated_batch_size"] if metric.meta.is_mean_reduction else []
    return ["value", "_forward_cache", *means]


def counts_of(module: LightningModule) -> dict[str, Any]:
    """Returns the internal counts of a module's metrics, which aren't part of its weights."""
    return {
        name: {"values": dict(metric.metric_state), "updates": metric._update_count}
        for name, metric in module.named_modules()
        if isinstance(metric, Metric)
    }


def put_counts(module: LightningModule, counts: Mapping[str, Any]) -> None:
    """Restores counts from `counts_of`, on the devices of the metrics."""
    for name, saved in counts.items():
        metric = module.get_submodule(name)
        for field, value in saved["values"].items():
            setattr(metric, field, move_data_to_device(value, metric.device))
        metric._update_count = saved["updates"]
