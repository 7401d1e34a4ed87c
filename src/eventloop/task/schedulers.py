"""Calls the task's scheduler functions, and computes the lengths that they can ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.clock import FIELDS, UNITS, Clock, Time
from eventloop.errors import SettingError, TaskError, closest
from eventloop.fixes import switch_off
from eventloop.task.value_checks import usable_scheduler

if TYPE_CHECKING:
    from eventloop.state import State


def schedulers_hook(given: Any, interval: str) -> Callable[[State], Any]:
    """Returns the hook that builds the schedulers of a task.

    Args:
        given: a function of an optimizer, or several by the optimizer's name.
        interval: the unit of the schedulers' steps, "ba" or "ep".

    Raises:
        TypeError: a function has an unknown parameter.
    """
    functions = given.values() if isinstance(given, Mapping) else [given]
    wanted = {id(one): _wanted(one) for one in functions}

    def build_schedulers(state: State) -> Mapping[str, Sequence[tuple[str, Any]]]:
        named = given if isinstance(given, Mapping) else dict.fromkeys(state.optimizers, given)
        for name in named:
            if name not in state.optimizers:
                raise TaskError(
                    f"a scheduler is named {name!r}, but no optimizer is"
                    f"{closest(name, state.optimizers)}",
                    optimizers=", ".join(state.optimizers) or "none",
                    fix="name these, or give one for all, Task(scheduler=schedules.cosine()); if they "
                    "are a plugin's, instead of the task's: " + switch_off("NAME"),
                )
        made = []
        for name, make in named.items():
            asked = {what: _ANSWERS[what](state, interval) for what in wanted[id(make)]}
            scheduler = make(state.optimizers[name], **asked)
            made.append((name, usable_scheduler(scheduler, name)))
        return {interval: made}

    return build_schedulers


def max_duration(state: State) -> Time:
    """Returns the length of the whole run; raises SettingError if max_duration is not set."""
    if state.duration is None:
        raise SettingError(
            "the task's scheduler needs the length of the run, but max_duration isn't set",
            fix='set max_duration, for example max_duration="10ep"',
        )
    return state.duration


def steps_per_epoch(state: State) -> int:
    """Returns the batches of an epoch; raises TaskError if the data loader has no length."""
    if state.epoch_length is None:
        raise TaskError(
            "the task's scheduler needs the number of batches in an epoch, but the train data "
            "loader has no length",
            fix='count the run and its schedule in batches: max_duration="5000ba"',
        )
    return state.epoch_length


def total_steps(state: State, interval: str) -> int:
    """Returns how often a scheduler steps in the whole run: its batches, or its epochs.

    Raises:
        SettingError: the length of the run isn't known in batches or epochs.
        TaskError: it must be converted between the two, and the data loader has no length.
    """
    if (duration := max_duration(state)).unit not in ("ba", "ep"):
        raise SettingError(
            f"the task's scheduler needs the number of steps of the run, which max_duration="
            f"{duration} doesn't tell",
            fix="set max_duration in batches or epochs, or take a schedule that counts as it does: "
            "scheduler=schedules.cosine()",
        )
    length = duration.value
    if interval == "ba" and duration.unit == "ep":
        length = round(length * steps_per_epoch(state))  # as the end of the run is rounded
    if interval == "ep" and duration.unit == "ba":
        length = length / steps_per_epoch(state)
    return max(1, int(length))


_ANSWERS: dict[str, Callable[[State, str], Any]] = {
    "max_duration": lambda state, interval: max_duration(state),
    "steps_per_epoch": lambda state, interval: steps_per_epoch(state),
    "total_steps": total_steps,
    "state": lambda state, interval: state,
}


def _wanted(make: Callable[..., Any]) -> list[str]:
    """Returns what a function needs besides the optimizer; raises TypeError if that is unknown."""
    try:
        first, *others = inspect.signature(make).parameters.values()
    except ValueError:
        first = None
        others = []
    name = getattr(make, "__name__", type(make).__name__)
    if first is None or first.kind is first.KEYWORD_ONLY:
        raise TypeError(
            f"Task(scheduler={name}) takes no optimizer: call it, scheduler={name}(), or write "
            "scheduler=lambda optimizer: ..."
        )
    given = (first.POSITIONAL_OR_KEYWORD, first.KEYWORD_ONLY)
    wanted = [one.name for one in others if one.default is one.empty and one.kind in given]
    for one in wanted:
        if one not in _ANSWERS:
            raise TypeError(
                f"Task(scheduler={name}) wants {one!r}, which isn't there{closest(one, _ANSWERS)}; "
                f"beside the optimizer it may name {', '.join(_ANSWERS)}"
            )
    return wanted


def unit_of(time: Time, state: State) -> str:
    """Returns the unit of a time; for a fraction of the run, the run's unit."""
    return max_duration(state).unit if time.unit == "dur" else time.unit


def length_in(name: str, time: Time, unit: str, state: State) -> float:
    """Converts a time to a unit.

    Args:
        name: what it is called in messages.

    Raises:
        SettingError: the conversion isn't known.
    """
    if (length := in_unit(time, unit, state)) is None:
        unmeasured = {time.unit, unit} == {"ep", "ba"}
        why = ", and the train data loader has no length" if unmeasured else ""
        raise SettingError(
            f"{name}={time} can't be compared with the end, which is counted in {UNITS[unit]}{why}",
            fix=f"write {name} in {UNITS[unit]} ({unit}) too",
        )
    return length


def in_unit(time: Time, unit: str, state: State) -> float | None:
    """Converts a time to a unit; None if unknown."""
    if time.unit == "dur":
        run = in_unit(max_duration(state), unit, state)
        return None if run is None else time.value * run
    if time.unit == unit:
        return time.value
    if state.epoch_length is not None:
        if (time.unit, unit) == ("ep", "ba"):
            return time.value * state.epoch_length
        if (time.unit, unit) == ("ba", "ep"):
            return time.value / state.epoch_length
    return None


def position(clock: Clock, unit: str, num_batches: int | None) -> float:
    """Returns the progress of a run, in a unit.

    Args:
        num_batches: of an epoch; if unknown, only whole epochs count.
    """
    if unit == "ep":
        part = clock.batch_in_epoch / num_batches if num_batches else 0.0
        return clock.epoch + min(1.0, part)
    done: float = getattr(clock, FIELDS[unit])
    return done
