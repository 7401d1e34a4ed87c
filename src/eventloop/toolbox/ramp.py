"""A ramp: what grows over a stretch of the run grows by the clock, and keeps no state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from eventloop.clock import Time
from eventloop.errors import SettingError
from eventloop.task.schedulers import length_in, position, unit_of

if TYPE_CHECKING:
    from eventloop.state import State
    from eventloop.view import StateView

__all__ = ["Ramp"]


@dataclass(frozen=True)
class Ramp:
    """Rises from 0 to 1 in a straight line between two times; made with `between`.

    Where the clock stands says all, so that a run that is resumed goes on exactly, and ranks agree
    (but on seconds, which each counts for itself).

    Args:
        unit: what the times are counted in.
        start: until when it is 0, counted from the start of the run.
        end: from when it is 1.
    """

    unit: str
    start: float
    end: float

    @classmethod
    def between(cls, start: Time | str | None, end: Time | str, state: State) -> Self:
        """Makes the ramp of a run, once its length is known: from `after_load` on.

        Args:
            start: None begins with the run. Either may be a fraction of it, `"0.5dur"`.

        Raises:
            SettingError: a time is a fraction of a run whose length isn't known, the two can't be
                compared, or `start` isn't before `end`.
        """
        first, last = None if start is None else Time(start), Time(end)
        if state.duration is None and "dur" in (last.unit, first and first.unit):
            raise SettingError(
                f"{last if last.unit == 'dur' else first} is a fraction of the run, whose "
                "max_duration isn't set",
                fix='set max_duration, for example max_duration="10ep"',
            )
        unit = unit_of(last, state)
        begin = length_in("start", first, unit, state) if first else 0.0
        stop = length_in("end", last, unit, state)
        if begin >= stop:
            raise SettingError(
                f"start={first} isn't before end={last}", fix="give an earlier start or a later end"
            )
        return cls(unit, begin, stop)

    def frac(self, state: State | StateView) -> float:
        """Returns the share of the way that is done before the batch that comes next, 0 to 1."""
        done = position(state.clock, self.unit, state.num_batches)
        return min(1.0, max(0.0, (done - self.start) / (self.end - self.start)))
