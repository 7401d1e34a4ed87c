"""The best evaluation so far, and which checkpoints are kept for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.errors import SettingError, closest

if TYPE_CHECKING:
    from torchmetrics import Metric


class Best:
    """Follows one metric of one eval data set.

    Args:
        dataset: the name of the eval data loader.
        metric: the name of the metric.
        is_higher: whether higher values are better.

    Attributes:
        batch: the batch count of the best evaluation; None before the first.
    """

    def __init__(self, dataset: str, metric: str, *, is_higher: bool) -> None:
        self._dataset = dataset
        self._metric = metric
        self._name = f"{'max' if is_higher else 'min'} {dataset}/{metric}"
        self._sign = 1.0 if is_higher else -1.0
        self._value = -math.inf
        self.batch: int | None = None
        self._before: tuple[float, int | None] = (-math.inf, None)

    @classmethod
    def among(cls, metrics: Mapping[str, Mapping[str, Metric]], wanted: str) -> Best:
        """Finds the metric that a person named: "test/accuracy", "min test/error".

        Args:
            metrics: by data set, "eval/test".

        Raises:
            SettingError: no metric has this name, or whether higher is better isn't known.
        """
        dataset, metric, is_higher = followed(metrics, wanted, "checkpoint_best")
        return cls(dataset, metric, is_higher=is_higher)

    def improves(self, results: Mapping[str, Mapping[str, Tensor]], batch: int) -> bool:
        """Takes up an evaluation; tells whether it is the best so far.

        Args:
            results: by data loader and metric; waits for the device.
        """
        value = self._sign * float(results[self._dataset][self._metric])
        if not value > self._value:  # a NaN is never the best
            return False
        self._before = (self._value, self.batch)
        self._value, self.batch = value, batch
        return True

    def batch_without(self, batch: int) -> int | None:
        """Returns the batch count of the best evaluation but that of one batch."""
        return self._before[1] if self.batch == batch else self.batch

    def withdraw(self, batch: int) -> None:
        """Goes back to the best before, if that of a batch is the best: its weights aren't finite."""
        if self.batch == batch:
            self._value, self.batch = self._before

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value so far, and when it came."""
        return {"metric": self._name, "value": self._value, "batch": self.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; what is known of another metric is of no use."""
        if state.get("metric") == self._name:
            self._value, self.batch = state["value"], state["batch"]


def followed(
    metrics: Mapping[str, Mapping[str, Metric]], wanted: str, by: str
) -> tuple[str, str, bool]:
    """Returns data set and name of the metric that a person named, and whether higher is better.

    Args:
        metrics: by data set, "eval/test".
        by: what follows it, for messages.

    Raises:
        SettingError: no metric has this name, or whether higher is better isn't known.
    """
    direction, _, name = wanted.rpartition(" ")
    known = {
        f"{dataset.removeprefix('eval/')}/{metric}": one
        for dataset, several in metrics.items()
        if dataset.startswith("eval/")
        for metric, one in several.items()
    }
    if name not in known or direction not in ("", "min", "max"):
        raise SettingError(
            f"{by}: no metric is named {wanted!r}{closest(name, known)}",
            fix=f"one of {', '.join(known)}" if known else "give Task(eval_dataloaders=...)",
        )
    is_higher = {"min": False, "max": True}.get(direction, known[name].higher_is_better)
    if is_higher is None:
        raise SettingError(
            f"{by}: the metric {name!r} doesn't say whether higher is better",
            fix=f'write "max {name}" or "min {name}"',
        )
    dataset, _, metric = name.partition("/")
    return dataset, metric, is_higher
