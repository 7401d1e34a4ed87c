"""Values that take the place of each other in the course of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from eventloop import Moment, Time
from eventloop.toolbox import FIELDS

T = TypeVar("T")
_AT_THE_START = re.compile(r"0+(?:\.0*)?([a-z]+)")


class Steps(Generic[T]):
    """Values by the time from which each is in force, in any order.

    Args:
        values: by time: {"5ep": 128}, {"0ep": 32, "0.5dur": 64}; one unit for all.

    Raises:
        ValueError: a time is none, or they can't be compared, or two are the same.
    """

    def __init__(self, values: Mapping[str, T] | Mapping[Time, T]) -> None:
        starts = {_parsed(time): value for time, value in values.items()}
        units = {unit for _, unit in starts}
        if len(units) > 1 or len(starts) < len(values):
            raise ValueError(
                f"the times {', '.join(map(str, values))} have to be different ones in one unit"
            )
        self.unit = next(iter(units), "")
        ordered = sorted(starts, key=lambda start: start[0])
        self._amounts = [amount for amount, _ in ordered]
        self.values = [starts[start] for start in ordered]

    def reached(self, at: Moment, duration: Time | None) -> int:
        """Returns how many of the times are reached at a moment of the run.

        Args:
            duration: the length of the run, which fractions are of.

        Raises:
            ValueError: they are fractions of a length that isn't known.
        """
        if not self.values:
            return 0
        unit = self.unit
        length = 1.0
        if unit == "dur":
            if duration is None:
                raise ValueError("dur is a fraction of the run, whose max_duration isn't set")
            unit = duration.unit
            length = duration.value
        now = getattr(at, FIELDS[unit])
        return sum(now >= amount * length for amount in self._amounts)


def _parsed(time: str | Time) -> tuple[float, str]:
    if isinstance(time, str) and (zero := _AT_THE_START.fullmatch(time.strip())):
        return 0.0, Time(f"1{zero[1]}").unit
    time = Time(time)  # says so where it is none, a number without a unit for example
    return time.value, time.unit
