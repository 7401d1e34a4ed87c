"""Errors of hook implementations: wrong results, and which one raised an exception or owns a frame.

The map from code to implementations is filled when plans are frozen, and read for a report, so the
loop records nothing.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from eventloop.errors import EventloopError, Note, PluginError, a, notes_of
from eventloop.fixes import published
from eventloop.naming import fold
from eventloop.signals import is_interrupted
from eventloop.training.failed_inputs import INPUT_ACTIONS, note_input

if TYPE_CHECKING:
    from eventloop.plugin.order import Implementation
    from eventloop.state import State

_GONE = object()
# Weak: plans keep their implementations, and the map outlives every run. An entry is replaced as
# a whole, since another thread may be reading.
_MAP: dict[CodeType, tuple[weakref.ref[Implementation], ...]] = {}

# What is called in a batch, outside of its microbatches, before the clock counts it.
_WITHIN_BATCH = frozenset(
    [
        "before_dataloader",
        "count_batch",
        "after_dataloader",
        "batch_start",
        "should_skip_batch",
        "train_batch",
        "before_train_batch",
        "split_batch",
        "clip_gradients",
        "after_train_batch",
        "should_skip_step",
        "optimizer_step",
        "zero_grad",
    ]
)


def enter(one: Implementation) -> None:
    """Registers an implementation under all code that its call runs."""
    for code, _ in _codes(one.function):
        alive = (ref for ref in _MAP.get(code, ()) if ref() is not None)
        _MAP[code] = (*alive, weakref.ref(one))


def implementations_of(frame: FrameType) -> list[Implementation]:
    """Returns the implementations that a frame may belong to; several only if they share code.

    Instances of one class share their code, and so do functions from one factory. A method's frame
    belongs to the instance in its first argument; functions from one factory can't be
    distinguished.
    """
    entered = [one for ref in _MAP.get(frame.f_code, ()) if (one := ref()) is not None]
    first = _first_argument(frame) if entered else _GONE
    return [
        one
        for one in entered
        for code, bound in _codes(one.function)
        if code is frame.f_code and (bound is None or bound is first or first is _GONE)
    ]


def _codes(function: Callable[..., Any] | None) -> Iterator[tuple[CodeType, object]]:
    """Yields the code of a function and of those it wraps, with the object each is bound to.

    All functions that a decorator wraps share its code, so it counts only if it is bound.
    """
    bound: object = None
    while function is not None:
        if isinstance(function, MethodType):
            bound, function = function.__self__, function.__func__
        elif isinstance(function, functools.partial):
            bound, function = (*function.args, bound)[0], function.func
        else:
            inner = getattr(function, "__dict__", {}).get("__wrapped__")
            if isinstance(function, FunctionType) and (inner is None or bound is not None):
                yield function.__code__, bound
            function = inner


def _first_argument(frame: FrameType) -> object:
    """Returns a function's first argument; `_GONE` if it has none, or has deleted it."""
    code, values = frame.f_code, frame.f_locals
    if code.co_argcount:
        return values.get(code.co_varnames[0], _GONE)
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_kwonlyargcount], ())
        return rest[0] if rest else _GONE
    return _GONE


def blame(error: BaseException, one: Implementation, state: State) -> None:
    """Adds a note to an exception, once: its implementation, hook and batch."""
    if one.hook.name in INPUT_ACTIONS:
        note_input(error, one.hook.name, state)
    if one.plugin.role == "core" or is_interrupted(error):
        return
    if notes_of(error, "origin"):
        return
    moment = f"{one.hook.name}, {moment_in(one.hook.name, state)}"
    text = f"in the task's {moment}"
    if one.plugin.role != "task":
        rank = state.layout.label(state.rank)
        text = f"raised by plugin {one.plugin.origin} in {moment}, rank {rank}\n  at   {one.where}"
        if fix := _fix(error, one):
            text += "\n  fix  " + fix
    error.add_note(Note(text, "origin"))


def _fix(error: BaseException, one: Implementation) -> str:
    """Returns what to do about an exception: correct the user's own plugin, or continue without it.

    Returns "" for the user's own plugin if the exception says itself what to do.
    """
    function = inspect.unwrap(one.function)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    if not file or _is_packaged(file, function.__module__ or "", one.plugin.distribution):
        return one.plugin.way_out
    if isinstance(error, EventloopError) and error.fix:
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    where = f"{file}:{lines[-1]}" if lines else one.where
    correction = f"correct the plugin's code at {where}"
    # A package in development may be switched off until its author has time for it.
    return (
        one.plugin.fix(correction)
        if one.plugin.found and not one.plugin.found.local
        else correction
    )


def _is_packaged(file: str, module: str, distribution: str) -> bool:
    """Returns whether code is of an installed package, so that the user didn't write it.

    Packages of the core's repository count as installed even where they lie in a clone.
    """
    package = fold(module.partition(".")[0])
    ours = {fold(distribution) for distribution in published().values()}
    if {package, fold(distribution)} & {"eventloop", *ours}:
        return True
    return bool({"site-packages", "dist-packages"} & {*Path(file).parts})


def moment_in(hook: str, state: State) -> str:
    """Returns a hook's epoch and batch, both from 1: the current ones, or the last finished."""
    clock = state.clock
    if state.eval_name is not None:
        return f"epoch {clock.epoch_number}, batch {clock.batch}"
    if hook in _WITHIN_BATCH or state.microbatch is not None:
        return f"epoch {clock.epoch + 1}, batch {clock.batch + 1}"
    epoch = clock.epoch + 1 if hook == "epoch_start" else clock.epoch_number
    return f"epoch {epoch}, batch {clock.batch}"


def swallowed(one: Implementation) -> PluginError:
    """Returns the error of a callback's wrapper that swallowed an exception."""
    return PluginError(
        f"a callback's wrapper of {one.hook.name} swallowed an exception; it can only watch",
        plugin=one.plugin.origin,
        at=one.where,
        fix="raise it again, or make the plugin an algorithm",
    )


def fits(result: Any, one: Implementation) -> bool:
    """Returns whether a wrapper may return a result instead of the enclosed one."""
    if result is None:
        return True
    if not isinstance(result, list):
        return False
    if one.hook.kind == "question":
        return all(answer is True or answer is False for answer in result)
    return one.hook.kind == "collection" or not result


def misfit(result: Any, one: Implementation) -> PluginError:
    """Returns the error of a result that its hook doesn't accept."""
    hook, what = one.hook, a(type(result).__name__)
    if hook.kind == "event":
        fix = "return nothing; to pass a value on, keep it on the plugin or log it"
        if hook.declared_by:
            fix = "return nothing; a hook whose results are collected has collection=True"
        what = f"the event {hook.name} got {what} as a result, which would be lost"
    elif not one.wrapper:
        fix = "return one of these"
        takes = "a question takes True, False" if hook.kind == "question" else "it takes a text"
        what = f"{hook.name} was answered with {result!r}; {takes} or None"
    else:
        fix = "return the list that `yield` gives, or another one"
        what = f"the wrapper of the {hook.kind} {hook.name} returned {what}, not a list of results"
    return PluginError(what, plugin=one.plugin.origin, at=one.where, fix=fix)


def returned_nothing(one: Implementation) -> PluginError:
    """Returns the error of an implementation that must return a result."""
    what = f"wrapper of the {one.hook.kind}" if one.wrapper else "owner of the action"
    fix = "return the result of `yield`" if one.wrapper else "return the result"
    return PluginError(
        f"the {what} {one.hook.name} returned nothing",
        plugin=one.plugin.origin,
        at=one.where,
        fix=fix if one.wrapper else f"{fix}, or pass with @hookimpl(conditional=True)",
    )
