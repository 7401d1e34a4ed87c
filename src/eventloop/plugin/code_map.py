"""The code map: which implementation of a hook a frame belongs to.

Filled when plans are frozen, and read when a report needs it: the loop keeps no account of where
it is.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventloop.plugin.order import Implementation

_GONE = object()
# Weak: plans keep their implementations, and the map outlives every run. An entry is replaced as
# a whole, since another thread may be reading.
_MAP: dict[CodeType, tuple[weakref.ref[Implementation], ...]] = {}


def enter(one: Implementation) -> None:
    """Enters an implementation under all code that runs when it is called."""
    for code, _ in _codes(one.function):
        alive = (ref for ref in _MAP.get(code, ()) if ref() is not None)
        _MAP[code] = (*alive, weakref.ref(one))


def implementations_of(frame: FrameType) -> list[Implementation]:
    """Returns the implementations that a frame may belong to; several only where nothing decides.

    Instances of one class share their code, as functions from one factory do. A method's frame is
    that of the instance in its first argument; functions from one factory can't be told apart.
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
    """Yields a function's code and that of what it wraps, with the object each is bound to.

    All functions that a decorator wraps share its code, so it counts only where it is bound.
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
    """Returns what a function was given first; `_GONE` if nothing, or if it has deleted that."""
    code, values = frame.f_code, frame.f_locals
    if code.co_argcount:
        return values.get(code.co_varnames[0], _GONE)
    if code.co_flags & inspect.CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_kwonlyargcount], ())
        return rest[0] if rest else _GONE
    return _GONE
