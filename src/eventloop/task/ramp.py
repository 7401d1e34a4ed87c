"""A ramp over a part of the run, computed from the clock, without state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from eventloop.clock import Time
from eventloop.errors import SettingError
from eventloop.task.schedulers import length_in, position, unit_of

if TYPE_CHECKING:
    from eventloop.state import State
    from eventloop.view import StateView


@dataclass(frozen=True)
class Ramp:
    """Rises linearly from 0 to 1 between two times; created with `between`.

    It depends only on the clock, so a resumed run continues exactly, and ranks agree (except in
    seconds, which each rank counts itself).

    Args:
        unit: of the times.
        start: 0 until then, counted from the start of the run.
        end: 1 from then on.
    """

    unit: str
    start: float
    end: float

    @classmethod
    def between(cls, start: Time | str | None, end: Time | str, state: State) -> Self:
        """Creates the ramp of a run whose length is known: from `after_load` on.

        Args:
            start: None: the start of the run. Both can be a fraction of the run, `"0.5dur"`.

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
        if begin >= (stop := length_in("end", last, unit, state)):
            raise SettingError(
                f"start={first} isn't before end={last}", fix="give an earlier start or a later end"
            )
        return cls(unit, begin, stop)

    def frac(self, state: State | StateView) -> float:
        """Returns the value of the ramp before the next batch, 0 to 1."""
        done = position(state.clock, self.unit, state.num_batches)
        return min(1.0, max(0.0, (done - self.start) / (self.end - self.start)))
