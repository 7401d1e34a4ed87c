"""Errors of hook implementations: wrong results, and the plugin that raised or that owns a frame.

The map from code to implementations is filled when plans are frozen and read only for a report, so
the loop has nothing to record.
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
# The references are weak because the map outlives every run; plans keep their implementations
# alive. An entry is replaced as a whole because another thread may be reading it.
_MAP: dict[CodeType, tuple[weakref.ref[Implementation], ...]] = {}

# Hooks called in a batch, outside of its microbatches, before the clock counts the batch.
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


def enter(impl: Implementation) -> None:
    """Registers an implementation under its function's code, and the code of functions it wraps."""
    for code, _ in _codes(impl.function):
        alive = (ref for ref in _MAP.get(code, ()) if ref() is not None)
        _MAP[code] = (*alive, weakref.ref(impl))


def implementations_of(frame: FrameType) -> list[Implementation]:
    """Returns the implementations that a frame may belong to.

    Instances of the same class share their code, and so do functions made by the same factory. A
    method's frame belongs to the instance in its first argument. Functions made by the same factory
    can't be distinguished, so all of them are returned.
    """
    candidates = [impl for ref in _MAP.get(frame.f_code, ()) if (impl := ref()) is not None]
    first_argument = _first_argument(frame) if candidates else _GONE
    return [
        impl
        for impl in candidates
        for code, bound in _codes(impl.function)
        if code is frame.f_code
        and (bound is None or bound is first_argument or first_argument is _GONE)
    ]


def _codes(function: Callable[..., Any] | None) -> Iterator[tuple[CodeType, object]]:
    """Yields the code of a function and of the functions it wraps, with the object each is bound to.

    All functions that a decorator wraps share the wrapper's code, so that code is only yielded for
    a bound method.
    """
    bound_object: object = None
    while function is not None:
        if isinstance(function, MethodType):
            bound_object = function.__self__
            function = function.__func__
        elif isinstance(function, functools.partial):
            bound_object = (*function.args, bound_object)[0]
            function = function.func
        else:
            inner = getattr(function, "__dict__", {}).get("__wrapped__")
            if isinstance(function, FunctionType) and (inner is None or bound_object is not None):
                yield function.__code__, bound_object
            function = inner


def _first_argument(frame: FrameType) -> object:
    """Returns the first argument of a frame's function; `_GONE` if it has none or deleted it."""
    code = frame.f_code
    values = frame.f_locals
    if code.co_argcount:
        return values.get(code.co_varnames[0], _GONE)
    if code.co_flags & inspect.CO_VARARGS:
        varargs = values.get(code.co_varnames[code.co_kwonlyargcount], ())
        return varargs[0] if varargs else _GONE
    return _GONE


def blame(error: BaseException, impl: Implementation, state: State) -> None:
    """Adds a note to an exception: its implementation, hook and batch.

    An exception passes through several plans on its way out; only the innermost adds a note.
    """
    if impl.hook.name in INPUT_ACTIONS:
        note_input(error, impl.hook.name, state)
    if impl.plugin.role == "core" or is_interrupted(error):
        return
    if notes_of(error, "origin"):
        return
    moment = f"{impl.hook.name}, {moment_in(impl.hook.name, state)}"
    text = f"in the task's {moment}"
    if impl.plugin.role != "task":
        rank = state.layout.label(state.rank)
        text = (
            f"raised by plugin {impl.plugin.origin} in {moment}, rank {rank}\n  at   {impl.where}"
        )
        if fix := _fix(error, impl):
            text += "\n  fix  " + fix
    error.add_note(Note(text, "origin"))


def _fix(error: BaseException, impl: Implementation) -> str:
    """Returns the fix for an exception: correct the plugin if it is the user's, or switch it off.

    Returns "" for the user's plugin if the exception already has a fix.
    """
    function = inspect.unwrap(impl.function)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    if not file or _is_packaged(file, function.__module__ or "", impl.plugin.distribution):
        return impl.plugin.way_out
    if isinstance(error, EventloopError) and error.fix:
        return ""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    location = f"{file}:{lines[-1]}" if lines else impl.where
    correction = f"correct the plugin's code at {location}"
    if impl.plugin.found and not impl.plugin.found.local:
        # A package in development may be switched off until its author has time for it.
        return impl.plugin.fix(correction)
    return correction


def _is_packaged(file: str, module: str, distribution: str) -> bool:
    """Returns whether code belongs to an installed package, which the user didn't write.

    Packages of the core's repository count as installed even in an editable clone.
    """
    package = fold(module.partition(".")[0])
    own_packages = {fold(distribution) for distribution in published().values()}
    if {package, fold(distribution)} & {"eventloop", *own_packages}:
        return True
    return bool({"site-packages", "dist-packages"} & {*Path(file).parts})


def moment_in(hook: str, state: State) -> str:
    """Returns the epoch and batch of a hook's call, both counted from 1.

    Outside of a batch or epoch, these are the last finished ones.
    """
    clock = state.clock
    if state.eval_name is not None:
        return f"epoch {clock.epoch_number}, batch {clock.batch}"
    if hook in _WITHIN_BATCH or state.microbatch is not None:
        return f"epoch {clock.epoch + 1}, batch {clock.batch + 1}"
    epoch = clock.epoch + 1 if hook == "epoch_start" else clock.epoch_number
    return f"epoch {epoch}, batch {clock.batch}"


def swallowed(impl: Implementation) -> PluginError:
    """Returns the error for a callback's wrapper that swallowed an exception."""
    return PluginError(
        f"a callback's wrapper of {impl.hook.name} swallowed an exception; it can only watch",
        plugin=impl.plugin.origin,
        at=impl.where,
        fix="raise it again, or make the plugin an algorithm",
    )


def fits(result: Any, impl: Implementation) -> bool:
    """Returns whether a wrapper may replace the enclosed result with this one."""
    if result is None:
        return True
    if not isinstance(result, list):
        return False
    if impl.hook.kind == "question":
        return all(answer is True or answer is False for answer in result)
    return impl.hook.kind == "collection" or not result


def misfit(result: Any, impl: Implementation) -> PluginError:
    """Returns the error for a result that its hook doesn't accept."""
    hook = impl.hook
    message = a(type(result).__name__)
    if hook.kind == "event":
        fix = "return nothing; to pass a value on, keep it on the plugin or log it"
        if hook.declared_by:
            fix = "return nothing; to collect results, declare the hook with collection=True"
        message = f"the event {hook.name} got {message} as a result, which would be lost"
    elif not impl.wrapper:
        fix = "return one of these"
        takes = "a question takes True, False" if hook.kind == "question" else "it takes a text"
        message = f"{hook.name} was answered with {result!r}; {takes} or None"
    else:
        fix = "return the list that `yield` evaluates to, or another list"
        message = (
            f"the wrapper of the {hook.kind} {hook.name} returned {message}, not a list of results"
        )
    return PluginError(message, plugin=impl.plugin.origin, at=impl.where, fix=fix)


def returned_nothing(impl: Implementation) -> PluginError:
    """Returns the error for an implementation that returned None but must return a result."""
    subject = f"wrapper of the {impl.hook.kind}" if impl.wrapper else "owner of the action"
    fix = "return the result of `yield`" if impl.wrapper else "return the result"
    return PluginError(
        f"the {subject} {impl.hook.name} returned nothing",
        plugin=impl.plugin.origin,
        at=impl.where,
        fix=fix if impl.wrapper else f"{fix}, or pass with @hookimpl(conditional=True)",
    )
