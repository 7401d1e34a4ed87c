"""The best evaluation so far, and which checkpoints are kept for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.training.metrics import NamedMetric, followed

if TYPE_CHECKING:
    from eventloop.state import State

_WHAT = "checkpoint_best"


class Best:
    """Follows one number of one eval set.

    Args:
        metric: which; whether higher is better is known.

    Attributes:
        batch: the batch count of the best evaluation; None before the first.
    """

    def __init__(self, metric: NamedMetric) -> None:
        self._followed = metric
        self._name = f"{'max' if metric.is_higher else 'min'} {metric.name}"
        self._sign = 1.0 if metric.is_higher else -1.0
        self._value = -math.inf
        self.batch: int | None = None
        self._before: tuple[float, int | None] = (-math.inf, None)

    @classmethod
    def named(cls, wanted: str, state: State) -> Best:
        """Follows the number that a person named: "test/accuracy", "min test/error".

        Raises:
            SettingError: there is none of that name, or whether higher is better isn't known.
        """
        return cls(followed(_WHAT, wanted, state))

    @property
    def eval_set(self) -> str:
        """The name of the eval set."""
        return self._followed.eval_set

    @property
    def name(self) -> str:
        """What is followed, and which way is better: max test/accuracy."""
        return self._name

    def improves(self, results: Mapping[str, Mapping[str, Tensor]], batch: int) -> bool:
        """Takes up an evaluation; returns whether it is the best so far.

        Args:
            results: by data loader and metric; waits for the device.

        Raises:
            SettingError: the number isn't among them.
        """
        value = self._sign * self._followed.value(results, _WHAT)
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
        """Restores what `state_dict` returned; the best of another metric is ignored."""
        if state.get("metric") == self._name:
            self._value, self.batch = state["value"], state["batch"]
