"""One implementation, as a plan calls it: with the State, the arguments that it takes, when it is due."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from eventloop.plugin.order import Implementation
from eventloop.view import StateView, view_of

if TYPE_CHECKING:
    from eventloop.state import State

STATE_ALONE = ("state",)


def direct(one: Implementation, state: State) -> tuple[Callable[[Any], Any], State | StateView]:
    """Returns a function and the State, or the view of it, that it takes."""
    if one.every is None and one.argnames == STATE_ALONE:
        return one.function, _given(one, state)
    call = adapted(one, state)
    return lambda _state: call(), state


def _given(one: Implementation, state: State) -> State | StateView:
    """Returns the State, of which a callback gets a view."""
    return view_of(state, one.origin) if one.plugin.role == "callback" else state


def adapted(one: Implementation, state: State) -> Callable[..., Any]:
    """Returns the function as it takes what the hook passes after the State, by position.

    The State, or a callback's view of it, is bound: there is one for the whole run.
    """
    given = _given(one, state)
    if one.argnames == one.hook.argnames:
        return _sometimes(one, functools.partial(one.function, given), state)
    idxs = [one.hook.argnames.index(name) for name in one.argnames]

    def pick(*rest: Any) -> Any:
        args = (given, *rest)
        return one.function(*(args[idx] for idx in idxs))

    return _sometimes(one, pick, state)


def _sometimes(
    one: Implementation, function: Callable[..., Any], state: State
) -> Callable[..., Any]:
    """Returns the function as its option `every` wants it: it runs once for each multiple crossed."""
    if one.every is None:
        return function
    every, clock = one.every, state.clock
    is_inside_batch = one.hook.per == "microbatch"
    if one.hook.declared_by and one.hook.per == "any":
        return _once_a_batch(one, function, state)

    def now_and_then(*rest: Any) -> Any:
        if clock.crossed(every) and not (is_inside_batch and state.microbatch_idx):
            return function(*rest)
        return None

    def around(*rest: Any) -> Generator[None, Any, Any]:
        if clock.crossed(every) and not (is_inside_batch and state.microbatch_idx):
            return (yield from function(*rest))
        return (yield)

    return around if one.wrapper else now_and_then


def _once_a_batch(
    one: Implementation, function: Callable[..., Any], state: State
) -> Callable[..., Any]:
    """Does the same for a plugin's hook, which may be called any number of times in a batch."""
    every, clock = one.every, state.clock
    assert every is not None
    last: list[int] = []

    def is_due() -> bool:
        due = clock.crossed(every) and last != [clock.batch]
        if due:
            last[:] = [clock.batch]
        return due

    def now_and_then(*rest: Any) -> Any:
        return function(*rest) if is_due() else None

    def around(*rest: Any) -> Generator[None, Any, Any]:
        return (yield from function(*rest)) if is_due() else (yield)

    return around if one.wrapper else now_and_then
