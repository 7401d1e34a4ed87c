"""Calls the task's scheduler functions with the lengths of the run that they request."""

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


def schedulers_hook(makers: Any, interval: str) -> Callable[[State], Any]:
    """Returns the hook that builds the schedulers of a task.

    Args:
        makers: a function of an optimizer, or a mapping of functions by the optimizer's name.
        interval: the unit of the schedulers' steps, "ba" or "ep".

    Raises:
        TypeError: a function has an unknown parameter.
    """
    functions = makers.values() if isinstance(makers, Mapping) else [makers]
    requested_names = {id(function): _requested_names(function) for function in functions}

    def build_schedulers(state: State) -> Mapping[str, Sequence[tuple[str, Any]]]:
        makers_by_name = makers
        if not isinstance(makers, Mapping):
            makers_by_name = dict.fromkeys(state.optimizers, makers)
        for name in makers_by_name:
            if name not in state.optimizers:
                raise TaskError(
                    f"a scheduler is named {name!r}, but no optimizer is"
                    f"{closest(name, state.optimizers)}",
                    optimizers=", ".join(state.optimizers) or "none",
                    fix="use these names, or a single scheduler for all optimizers, "
                    "Task(scheduler=schedules.cosine()); if a plugin built them instead of the task: "
                    + switch_off("NAME"),
                )
        schedulers = []
        for name, make in makers_by_name.items():
            arguments = {
                argument: _ARGUMENTS[argument](state, interval)
                for argument in requested_names[id(make)]
            }
            scheduler = make(state.optimizers[name], **arguments)
            schedulers.append((name, usable_scheduler(scheduler, name)))
        return {interval: schedulers}

    return build_schedulers


def max_duration(state: State) -> Time:
    """Returns the length of the whole run; raises SettingError if `max_duration` is not set."""
    if state.duration is None:
        raise SettingError(
            "the task's scheduler needs the length of the run, but max_duration isn't set",
            fix='set max_duration, for example max_duration="10ep"',
        )
    return state.duration


def steps_per_epoch(state: State) -> int:
    """Returns the number of batches in an epoch; raises TaskError if the data loader has no length."""
    if state.epoch_length is None:
        raise TaskError(
            "the task's scheduler needs the number of batches in an epoch, but the train data "
            "loader has no length",
            fix='count the run and its schedule in batches: max_duration="5000ba"',
        )
    return state.epoch_length


def total_steps(state: State, interval: str) -> int:
    """Returns the number of scheduler steps in the whole run: batches ("ba") or epochs ("ep").

    Raises:
        SettingError: the length of the run isn't given in batches or epochs.
        TaskError: the conversion between batches and epochs needs the data loader's length, but it has
            none.
    """
    duration = max_duration(state)
    if duration.unit not in ("ba", "ep"):
        raise SettingError(
            "the task's scheduler needs the number of steps of the run, which is unknown with "
            f"max_duration={duration}",
            fix="set max_duration in batches or epochs, or use a schedule that supports this unit: "
            "scheduler=schedules.cosine()",
        )
    length = duration.value
    if interval == "ba" and duration.unit == "ep":
        length = round(length * steps_per_epoch(state))  # rounded like the end of the run
    if interval == "ep" and duration.unit == "ba":
        length = length / steps_per_epoch(state)
    return max(1, int(length))  # torch's schedulers raise for 0 steps


# The arguments that a scheduler function may request by the names of its parameters.
_ARGUMENTS: dict[str, Callable[[State, str], Any]] = {
    "max_duration": lambda state, interval: max_duration(state),
    "steps_per_epoch": lambda state, interval: steps_per_epoch(state),
    "total_steps": total_steps,
    "state": lambda state, interval: state,
}


def _requested_names(make: Callable[..., Any]) -> list[str]:
    """Returns the names of a function's required parameters, without the optimizer.

    Raises:
        TypeError: a name is unknown, or the function takes no optimizer.
    """
    try:
        optimizer_parameter, *parameters = inspect.signature(make).parameters.values()
    except ValueError:  # no parameters, or no signature
        optimizer_parameter = None
        parameters = []
    name = getattr(make, "__name__", type(make).__name__)
    if optimizer_parameter is None or optimizer_parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        raise TypeError(
            f"Task(scheduler={name}) takes no optimizer: call it, scheduler={name}(), or write "
            "scheduler=lambda optimizer: ..."
        )
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind in named_kinds
    ]
    for requested in names:
        if requested not in _ARGUMENTS:
            raise TypeError(
                f"Task(scheduler={name}) requires the unknown argument {requested!r}"
                f"{closest(requested, _ARGUMENTS)}; besides the optimizer, it can use "
                f"{', '.join(_ARGUMENTS)}"
            )
    return names


def unit_of(time: Time, state: State) -> str:
    """Returns the unit of a time; for a fraction of the run, the run's unit."""
    return max_duration(state).unit if time.unit == "dur" else time.unit


def length_in(name: str, time: Time, unit: str, state: State) -> float:
    """Converts a time to a unit.

    Args:
        name: its name in messages.

    Raises:
        SettingError: the time can't be converted.
    """
    length = in_unit(time, unit, state)
    if length is None:
        needs_epoch_length = {time.unit, unit} == {"ep", "ba"}
        reason = ", and the train data loader has no length" if needs_epoch_length else ""
        raise SettingError(
            f"{name}={time} can't be compared with the end, which is counted in "
            f"{UNITS[unit]}{reason}",
            fix=f"write {name} in {UNITS[unit]} ({unit}) too",
        )
    return length


def in_unit(time: Time, unit: str, state: State) -> float | None:
    """Converts a time to a unit; returns None if it can't be converted."""
    if time.unit == "dur":
        run_length = in_unit(max_duration(state), unit, state)
        return None if run_length is None else time.value * run_length
    if time.unit == unit:
        return time.value
    if state.epoch_length is not None:
        if (time.unit, unit) == ("ep", "ba"):
            return time.value * state.epoch_length
        if (time.unit, unit) == ("ba", "ep"):
            return time.value / state.epoch_length
    return None


def position(clock: Clock, unit: str, num_batches: int | None) -> float:
    """Returns how far a run has come, in a unit.

    Args:
        num_batches: the number of batches of an epoch; if unknown, only whole epochs count.
    """
    if unit == "ep":
        epoch_frac = clock.batch_in_epoch / num_batches if num_batches else 0.0
        return clock.epoch + min(1.0, epoch_frac)
    count: float = getattr(clock, FIELDS[unit])
    return count
