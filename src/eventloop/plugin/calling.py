"""How a plan calls implementations, and the wrappers around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.errors import PluginError
from eventloop.plugin.hook_errors import blame, fits, misfit, returned_nothing, swallowed
from eventloop.plugin.hook_intervals import at_intervals
from eventloop.view import StateView, view_of

if TYPE_CHECKING:
    from eventloop.plugin.order import Implementation
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
    return at_intervals(one, functools.partial(caller(one), _argument(one, state)), state)


def caller(one: Implementation) -> Callable[..., Any]:
    """Returns the function as one that takes all arguments of its hook, `state` first."""
    function = one.function
    names = one.hook.argnames
    if one.argnames == names:
        return function
    idxs = [names.index(name) for name in one.argnames]
    return lambda *args: function(*(args[idx] for idx in idxs))


def enclose(inner: Plan, wrappers: Sequence[Implementation], state: State) -> Plan:
    """Wraps a plan, the first wrapper outermost."""
    for one in reversed(wrappers):
        inner = _wrap(inner, one, state)
    return inner


def _wrap(inner: Plan, one: Implementation, state: State) -> Plan:
    start: Callable[..., Generator[None, Any, Any]] = adapted(one, state)
    is_action = one.hook.kind == "action"
    must_return = one.hook.kind != "event" and not one.conditional

    def enclosed(*args: Any) -> Any:
        outer_again = state.enclosed

        def run(*others: Any) -> Any:
            state.enclosed = None  # what is enclosed would ask for itself, without end
            try:
                return inner(args[0], *others) if others else inner(*args)
            finally:
                state.enclosed = again

        state.enclosed = again = run if is_action else None
        result = None
        passing = None
        try:
            generator = start(*args[1:])
            try:
                next(generator)
            except StopIteration:
                raise PluginError("a wrapper didn't yield", wrapper=one.origin) from None
            try:
                result = run()
            except BaseException as error:  # noqa: BLE001  the wrapper decides what becomes of it
                passing = error
            result = _resume(generator, result, passing, one)
            if passing is not None and one.plugin.role == "callback":
                raise swallowed(one) from passing
            if result is None and must_return:
                raise returned_nothing(one)
            if not is_action and not fits(result, one):
                raise misfit(result, one)
            return result
        except BaseException as error:
            if error is not passing:
                blame(error, one, state)
            raise
        finally:
            state.enclosed = outer_again

    return enclosed


def _resume(
    generator: Generator[None, Any, Any],
    result: Any,
    error: BaseException | None,
    one: Implementation,
) -> Any:
    """Resumes a wrapper with the result or exception of the enclosed call; returns its own result."""
    try:
        if error is None:
            generator.send(result)
        else:
            generator.throw(error)
    except StopIteration as stop:
        return stop.value
    except RuntimeError as converted:
        # Python turns a StopIteration that leaves a generator into a RuntimeError.
        if isinstance(error, StopIteration) and converted.__cause__ is error:
            generator.close()
            raise error from None
        raise
    generator.close()
    raise PluginError("a wrapper yielded a second time", wrapper=one.origin)
