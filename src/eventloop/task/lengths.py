"""Lengths of a run in one unit, so that they can be compared with each other and with the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.clock import FIELDS, UNITS, Clock, Time
from eventloop.errors import SettingError
from eventloop.task.schedulers import max_duration

if TYPE_CHECKING:
    from eventloop.state import State


def unit_of(time: Time, state: State) -> str:
    """Returns the unit in which a time is counted: that of the run, where it is a fraction of it."""
    return max_duration(state).unit if time.unit == "dur" else time.unit


def length_in(name: str, time: Time, unit: str, state: State) -> float:
    """Returns how many of `unit` a time is.

    Args:
        name: what it is called in messages.

    Raises:
        SettingError: it isn't known.
    """
    length = in_unit(time, unit, state)
    if length is None:
        unmeasured = {time.unit, unit} == {"ep", "ba"}
        why = ", and the train data loader has no length" if unmeasured else ""
        raise SettingError(
            f"{name}={time} can't be compared with the end, which is counted in {UNITS[unit]}{why}",
            fix=f"write {name} in {UNITS[unit]} ({unit}) too",
        )
    return length


def in_unit(time: Time, unit: str, state: State) -> float | None:
    """Returns how many of `unit` a time is; None if unknown."""
    if time.unit == "dur":
        run = in_unit(max_duration(state), unit, state)
        return None if run is None else time.value * run
    if time.unit == unit:
        return time.value
    if state.num_batches is not None:
        if (time.unit, unit) == ("ep", "ba"):
            return time.value * state.num_batches
        if (time.unit, unit) == ("ba", "ep"):
            return time.value / state.num_batches
    return None


def position(clock: Clock, unit: str, num_batches: int | None) -> float:
    """Returns where a run is, in a unit.

    Args:
        num_batches: of an epoch; where it isn't known, whole epochs alone count.
    """
    if unit == "ep":
        part = clock.batch_in_epoch / num_batches if num_batches else 0.0
        return clock.epoch + min(1.0, part)
    done: float = getattr(clock, FIELDS[unit])
    return done
