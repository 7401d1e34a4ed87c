"""Calls of implementations, and of the wrappers around them, as plans make them."""

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


def direct(impl: Implementation, state: State) -> tuple[Callable[[Any], Any], State | StateView]:
    """Returns a function of one argument, and that argument: the State or a callback's view of it.

    Without `functools.partial` in between, the call takes a third less time.
    """
    if impl.every is None and impl.argnames == STATE_ALONE:
        return impl.function, _argument(impl, state)
    call = adapted(impl, state)
    return lambda _state: call(), state


def _argument(impl: Implementation, state: State) -> State | StateView:
    """Returns the State, or a view of it for a callback."""
    return view_of(state, impl.origin) if impl.plugin.role == "callback" else state


def adapted(impl: Implementation, state: State) -> Callable[..., Any]:
    """Returns the function with the State bound, taking the hook's other arguments by position.

    The State, or a callback's view of it, is the same for the whole run.
    """
    return at_intervals(impl, functools.partial(caller(impl), _argument(impl, state)), state)


def caller(impl: Implementation) -> Callable[..., Any]:
    """Returns a function that takes all arguments of the hook, `state` first.

    pluggy's semantics: an implementation may take only some of the hook's arguments.
    """
    function = impl.function
    names = impl.hook.argnames
    if impl.argnames == names:
        return function
    idxs = [names.index(name) for name in impl.argnames]
    return lambda *args: function(*(args[idx] for idx in idxs))


def enclose(inner: Plan, wrappers: Sequence[Implementation], state: State) -> Plan:
    """Wraps a plan in wrappers, with the first wrapper outermost."""
    for impl in reversed(wrappers):
        inner = _wrap(inner, impl, state)
    return inner


def _wrap(inner: Plan, impl: Implementation, state: State) -> Plan:
    start: Callable[..., Generator[None, Any, Any]] = adapted(impl, state)
    is_action = impl.hook.kind == "action"
    must_return = impl.hook.kind != "event" and not impl.conditional

    def enclosed(*args: Any) -> Any:
        outer_again = state.enclosed

        def run(*new_arguments: Any) -> Any:
            state.enclosed = None  # `again` in an enclosed implementation would recurse forever
            try:
                return inner(args[0], *new_arguments) if new_arguments else inner(*args)
            finally:
                state.enclosed = rest_of_chain

        state.enclosed = rest_of_chain = run if is_action else None
        result = None
        passing = None
        try:
            generator = start(*args[1:])
            try:
                next(generator)
            except StopIteration:
                raise PluginError("a wrapper didn't yield", wrapper=impl.origin) from None
            try:
                result = run()
            except BaseException as error:  # noqa: BLE001  the wrapper may handle it
                passing = error
            result = _resume(generator, result, passing, impl)
            if passing is not None and impl.plugin.role == "callback":
                raise swallowed(impl) from passing
            if result is None and must_return:
                raise returned_nothing(impl)
            if not is_action and not fits(result, impl):
                raise misfit(result, impl)
            return result
        except BaseException as error:
            if error is not passing:
                blame(error, impl, state)
            raise
        finally:
            state.enclosed = outer_again

    return enclosed


def _resume(
    generator: Generator[None, Any, Any],
    result: Any,
    error: BaseException | None,
    impl: Implementation,
) -> Any:
    """Resumes a wrapper with the enclosed call's result or exception; returns the wrapper's result.

    Raises:
        PluginError: the wrapper yielded a second time.
    """
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
    raise PluginError("a wrapper yielded a second time", wrapper=impl.origin)
