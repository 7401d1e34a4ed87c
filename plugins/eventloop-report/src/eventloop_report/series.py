"""The numbers of a run, kept in bounded memory however long it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_POINTS = 1_000
MAX_SERIES = 200
# Beyond, the maths of axes overflows.
_LARGEST = 1e100


class Series:
    """One number over the run: points that are means of `stride` values in a row.

    If there are too many points, neighbours are merged in pairs, and the stride doubles. A value that
    isn't finite, or too large for axes, is a gap.

    Attributes:
        num_values: how many there were.
        latest: the latest value, as it came; None before the first.
    """

    def __init__(self) -> None:
        self.num_values = 0
        self.latest: float | None = None
        self._points: list[tuple[float, float]] = []
        self._stride = 1
        self._open: list[tuple[float, float]] = []

    def add(self, batch: float, value: float) -> None:
        """Adds the value after so many batches."""
        self.num_values += 1
        self.latest = value
        self._open.append((batch, value))
        if len(self._open) == self._stride:
            self._points.append(_mean(self._open))
            self._open = []
        if len(self._points) == MAX_POINTS:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_mean(pair) for pair in pairs]
            self._stride *= 2

    def points(self) -> list[tuple[float, float]]:
        """Returns batches and values, in order; values that fill no point yet are the last one."""
        return [*self._points, *([_mean(self._open)] if self._open else [])]

    def state_dict(self) -> dict[str, Any]:
        """Returns everything."""
        return {
            "num_values": self.num_values,
            "latest": self.latest,
            "stride": self._stride,
            "points": _tensor(self._points),
            "open": _tensor(self._open),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.num_values = state["num_values"]
        self.latest = state["latest"]
        self._stride = state["stride"]
        self._points = _pairs(state["points"])
        self._open = _pairs(state["open"])


class Numbers:
    """All numbers of a run by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Series] = {}
        self._left_out: set[str] = set()

    @property
    def num_left_out(self) -> int:
        """How many names came when there were too many already, as far as they were counted."""
        return len(self._left_out)

    def add(self, name: str, batch: float, value: float) -> None:
        """Adds a value to the series of its name."""
        name = name.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair, say
        if name not in self.by_name:
            if len(self.by_name) == MAX_SERIES:
                if len(self._left_out) < MAX_SERIES:
                    self._left_out.add(name)
                return
            self.by_name[name] = Series()
        self.by_name[name].add(batch, value)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything."""
        named = [[name, series.state_dict()] for name, series in self.by_name.items()]
        return {"named": named, "left_out": sorted(self._left_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self.by_name = {}
        for name, saved in state["named"]:
            self.by_name[name] = series = Series()
            series.load_state_dict(saved)
        self._left_out = set(state["left_out"])


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the last batch, and the mean of the values that can be drawn; NaN where none can."""
    values = [value for _, value in points if abs(value) < _LARGEST]
    return points[-1][0], sum(values) / len(values) if values else math.nan


def _tensor(points: Sequence[tuple[float, float]]) -> Tensor:
    return torch.tensor(points, dtype=torch.float64).reshape(-1, 2)


def _pairs(points: Tensor) -> list[tuple[float, float]]:
    return [(batch, value) for batch, value in points.tolist()]
