"""Waits for a better value, until the patience runs out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from eventloop import Moment, Time
from eventloop.toolbox import FIELDS


class Since(NamedTuple):
    """The time of the best value, or of the start of the waiting.

    Args:
        epoch: number of the epoch, from 1.
        batch: number of finished batches.
        amount: the same time in the unit of the patience.
    """

    epoch: int
    batch: int
    amount: float


class Waiting:
    """Follows a number over a run and detects when it has stopped improving.

    It decides at each new value, because nothing is known between two values.

    Args:
        name: name of the number, for messages.
        is_higher: whether higher values are better.
        patience: time since the best value after which a worse value ends the waiting; not in "dur".
        min_delta: difference by which a value has to be better than the best, 0 or more.
        stops_at_nan: whether a NaN ends the waiting; otherwise it counts as no improvement.

    Attributes:
        best: the best value so far; None before the first.
        since: the time of the best value, or of the start of the waiting.
        reason: why the waiting has ended; None while it hasn't.
    """

    def __init__(
        self,
        name: str,
        *,
        is_higher: bool,
        patience: Time,
        min_delta: float = 0.0,
        stops_at_nan: bool = False,
    ) -> None:
        self.name = name
        self.patience = patience
        self._is_higher = is_higher
        self._min_delta = min_delta
        self._stops_at_nan = stops_at_nan
        self.best: float | None = None
        self.since: Since | None = None
        self.reason: str | None = None

    def begin(self, moment: Moment, epoch: int | None = None) -> None:
        """Starts waiting at this moment for a value better than the best so far.

        Args:
            epoch: number of the moment's epoch, from 1, for messages; None for the number of finished epochs.
        """
        self.since = self._moment(moment, epoch)
        self.reason = None

    def take(self, value: float, moment: Moment, epoch: int | None = None) -> None:
        """Compares a new value with the best; the other arguments are as in `begin`."""
        if self._stops_at_nan and math.isnan(value):
            self.reason = f"{self.name} is NaN"
        elif self._is_better(value):
            self.best = value
            self.since = self._moment(moment, epoch)
        elif self.since is None:
            self.since = self._moment(moment, epoch)
        elif self._moment(moment, epoch).amount - self.since.amount >= self.patience.value:
            self.reason = f"{self.name} {self._compared()} in {self.patience}"

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            # Any value except the worst infinity improves on nothing.
            return value > -math.inf if self._is_higher else value < math.inf
        gain = value - self.best if self._is_higher else self.best - value
        return gain > 0 and gain >= self._min_delta  # comparisons with NaN are false

    def _moment(self, moment: Moment, epoch: int | None) -> Since:
        return Since(
            moment.epoch if epoch is None else epoch,
            moment.batch,
            getattr(moment, FIELDS[self.patience.unit]),
        )

    def _compared(self) -> str:
        if self.best is None or self.since is None:
            return "gave no number"
        margin = f" by {self._min_delta:g}" if self._min_delta else ""
        epoch = self.since.epoch
        batch = self.since.batch
        return f"hasn't improved{margin} on {self.best:.6g} (epoch {epoch}, batch {batch})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, its time, and why the waiting has ended."""
        since = None if self.since is None else list(self.since)
        return {"best": self.best, "since": since, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the waiting from `state_dict`."""
        since = state["since"]
        self.best = state["best"]
        self.reason = state["reason"]
        self.since = None if since is None else Since(*since)
