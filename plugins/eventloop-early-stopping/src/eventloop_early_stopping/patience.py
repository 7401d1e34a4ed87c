"""Waiting for a better value: when the best one came, and when the patience is at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from eventloop import Moment, Time
from eventloop.toolbox import FIELDS


class Since(NamedTuple):
    """When something was waited for first.

    Args:
        epoch: its number, from 1.
        batch: how many were done.
        amount: the same in the unit of the patience.
    """

    epoch: int
    batch: int
    amount: float


class Waiting:
    """Follows one number over a run and detects when it has stopped improving.

    Whether to go on is decided by each new value: between two of them nothing is known.

    Args:
        name: of the number, for messages.
        is_higher: whether higher values are better.
        patience: how long after the best value a worse one is the last; no "dur".
        min_delta: by how much a value has to be better than the best, 0 or more.
        stops_at_nan: whether a NaN ends the waiting; otherwise it counts as no improvement.

    Attributes:
        best: the best value so far; None before the first.
        since: when it came, or when the waiting began.
        reason: why the waiting is over; None while it isn't.
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

    def begin(self, at: Moment, epoch: int | None = None) -> None:
        """Waits from this moment on, for something better than the best so far.

        Args:
            epoch: the number of the moment's epoch, from 1, for messages; None: as many as are done.
        """
        self.since = self._moment(at, epoch)
        self.reason = None

    def take(self, value: float, at: Moment, epoch: int | None = None) -> None:
        """Takes up a new value; the other arguments are as for `begin`."""
        if self._stops_at_nan and math.isnan(value):
            self.reason = f"{self.name} is NaN"
        elif self._is_better(value):
            self.best, self.since = value, self._moment(at, epoch)
        elif self.since is None:
            self.since = self._moment(at, epoch)
        elif self._moment(at, epoch).amount - self.since.amount >= self.patience.value:
            self.reason = f"{self.name} {self._compared()} in {self.patience}"

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            # Anything is better than infinitely bad.
            return value > -math.inf if self._is_higher else value < math.inf
        gain = value - self.best if self._is_higher else self.best - value
        return gain > 0 and gain >= self._min_delta  # never so for a NaN

    def _moment(self, at: Moment, epoch: int | None) -> Since:
        return Since(
            at.epoch if epoch is None else epoch, at.batch, getattr(at, FIELDS[self.patience.unit])
        )

    def _compared(self) -> str:
        if self.best is None or self.since is None:
            return "gave no number"
        by = f" by {self._min_delta:g}" if self._min_delta else ""
        epoch = self.since.epoch
        batch = self.since.batch
        return f"hasn't improved{by} on {self.best:.6g} (epoch {epoch}, batch {batch})"

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value, since when it is waited, and why that is over."""
        since = None if self.since is None else list(self.since)
        return {"best": self.best, "since": since, "reason": self.reason}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        since = state["since"]
        self.best = state["best"]
        self.reason = state["reason"]
        self.since = None if since is None else Since(*since)
