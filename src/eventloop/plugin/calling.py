"""How a plan calls implementations: the arguments that each takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eventloop.plugin.hook_intervals import at_intervals
from eventloop.plugin.order import Implementation
from eventloop.view import StateView, view_of

if TYPE_CHECKING:
    from eventloop.state import State

STATE_ALONE = ("state",)
Plan = Callable[..., Any]


def direct(one: Implementation, state: State) -> tuple[Callable[[Any], Any], State | StateView]:
    """Returns a function and its first argument: the State, or a callback's view of it."""
    if one.every is None and one.argnames == STATE_ALONE:
        return one.function, _argument(one, state)
    call = adapted(one, state)
    return lambda _state: call(), state


def _argument(one: Implementation, state: State) -> State | StateView:
    """Returns the State, or a view of it for a callback."""
    return view_of(state, one.origin) if one.plugin.role == "callback" else state


def adapted(one: Implementation, state: State) -> Callable[..., Any]:
    """Returns the function with the State bound, taking the hook's other arguments by position.

    The State, or a callback's view of it, is the same for the whole run.
    """
    argument = _argument(one, state)
    if one.argnames == one.hook.argnames:
        return at_intervals(one, functools.partial(one.function, argument), state)
    idxs = [one.hook.argnames.index(name) for name in one.argnames]

    def pick(*rest: Any) -> Any:
        args = (argument, *rest)
        return one.function(*(args[idx] for idx in idxs))

    return at_intervals(one, pick, state)
