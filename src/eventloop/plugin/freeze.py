"""Freezing: from the ordered implementations of a hook to the one function that the loop calls.

What a call means is pluggy's definition: results that aren't None are gathered in order, an
action stops at the first, wrappers enclose all plain implementations and may replace result and
exception. A plan only leaves out, before the run, what the run wouldn't need.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from eventloop.actions import Actions
from eventloop.errors import PluginError
from eventloop.events import Events
from eventloop.hooks import Hook
from eventloop.plugin.order import Implementation, order_of_owners
from eventloop.state import State, StateView

Plan = Callable[..., Any]
BLAME = "raised by plugin "


class Plans(Events, Actions, Protocol):
    """The plans of all hooks, by name: `plans.batch_end(state)`."""


def freeze(hook: Hook, ordered: Sequence[Implementation], state: State) -> Plan:
    """Gives the plan of a hook: a function that takes the hook's arguments by position.

    Args:
        ordered: the hook's implementations in order, as `order` gives them.
        state: the State of the run; callbacks are given a view of it.
    """
    plain = [one for one in ordered if not one.wrapper]
    wrappers = [one for one in ordered if one.wrapper]
    if hook.name == "close":
        return _tell_all(list(reversed(plain)), state)
    if hook.name == "exception":
        return _tell_all(plain, state)
    if hook.kind == "action":
        return _enclose(_act(hook, order_of_owners(plain), state), wrappers, state)
    gather = _enclose(_gather(plain, state), wrappers, state)
    return _ask(hook, gather, plain) if hook.kind == "question" else gather


def nothing(*_args: object) -> tuple[()]:
    """The plan of an event that nobody implements."""
    return ()


def nobody(*_args: object) -> bool:
    """The plan of a question that nobody answers."""
    return False


def _gather(plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all, in order, and gives their results that aren't None."""
    if not plain:
        return nothing
    calls = [(_adapted(one, state), one) for one in plain]
    if len(calls) == 1:
        ((function, only),) = calls

        def call_one(*args: Any) -> list[Any]:
            try:
                result = function(*args)
            except BaseException as error:
                _blame(error, only, state)
                raise
            return [] if result is None else [result]

        return call_one

    def call_each(*args: Any) -> list[Any]:
        results = []
        for function, one in calls:
            try:
                result = function(*args)
            except BaseException as error:
                _blame(error, one, state)
                raise
            if result is not None:
                results.append(result)
        return results

    return call_each


def _ask(hook: Hook, gather: Plan, plain: Sequence[Implementation]) -> Plan:
    """Reduces the answers to one: any True means yes."""
    if gather is nothing:
        return nobody

    def ask(*args: Any) -> bool:
        answers = gather(*args)
        for answer in answers:
            if answer is not True and answer is not False:
                raise PluginError(
                    f"{hook.name} was answered with {answer!r}; a question takes True, False "
                    "or None",
                    asked=", ".join(one.plugin.origin for one in plain),
                )
        return True in answers

    return ask


def _act(hook: Hook, plain: Sequence[Implementation], state: State) -> Plan:
    """Asks those who may pass, then the owner, and gives the first result."""
    owner_idx = next((i for i, one in enumerate(plain) if not one.conditional), len(plain))
    asked = plain[: owner_idx + 1]
    if len(asked) == 1 and asked[0].plugin.role == "core":
        return asked[0].function
    calls = [(_adapted(one, state), one) for one in asked]

    def act(*args: Any) -> Any:
        for function, one in calls:
            try:
                result = function(*args)
                if result is None and not one.conditional:
                    raise _returned_nothing(one)
            except BaseException as error:
                _blame(error, one, state)
                raise
            if result is not None:
                return result
        return None

    return act


def _enclose(inner: Plan, wrappers: Sequence[Implementation], state: State) -> Plan:
    """Puts the wrappers around a plan, the first outermost."""
    for one in reversed(wrappers):
        inner = _wrap(inner, one, state)
    return inner


def _wrap(inner: Plan, one: Implementation, state: State) -> Plan:
    start: Callable[..., Generator[None, Any, Any]] = _adapted(one, state)
    is_action = one.hook.kind == "action"

    def enclosed(*args: Any) -> Any:
        outer_again = state._again
        state._again = again = (lambda: inner(*args)) if is_action else None
        passing: BaseException | None = None
        try:
            generator = start(*args)
            try:
                next(generator)
            except StopIteration:
                raise PluginError("a wrapper didn't yield", wrapper=one.origin) from None
            try:
                result = inner(*args)
            except BaseException as error:
                passing = error
            state._again = again
            result = _throw(generator, passing, one) if passing else _send(generator, result, one)
            if result is None and is_action and not one.conditional:
                raise _returned_nothing(one)
            return result
        except BaseException as error:
            if error is not passing:
                _blame(error, one, state)
            raise
        finally:
            state._again = outer_again

    return enclosed


def _send(generator: Generator[None, Any, Any], result: Any, one: Implementation) -> Any:
    """Resumes a wrapper with the result of what it encloses; gives what it returns."""
    try:
        generator.send(result)
    except StopIteration as stop:
        return stop.value
    generator.close()
    raise PluginError("a wrapper yielded a second time", wrapper=one.origin)


def _throw(generator: Generator[None, Any, Any], error: BaseException, one: Implementation) -> Any:
    """Resumes a wrapper with the exception of what it encloses; gives what it returns."""
    try:
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


def _tell_all(plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all, whatever any of them raises; gives what they raised."""
    calls = [(_adapted(one, state), one) for one in plain]

    def tell_all(*args: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        for function, one in calls:
            try:
                function(*args)
            except BaseException as error:
                _blame(error, one, state)
                failures.append(error)
        return failures

    return tell_all


def _adapted(one: Implementation, state: State) -> Callable[..., Any]:
    """Gives the function as it takes the hook's arguments: all of them, by position."""
    function = one.function
    view = StateView(state, one.origin) if one.plugin.role == "callback" else None
    if one.argnames == one.hook.argnames == ("state",):
        return function if view is None else lambda _state: function(view)
    idxs = [one.hook.argnames.index(name) for name in one.argnames]

    def pick(*args: Any) -> Any:
        given = (state if view is None else view, *args[1:])
        return function(*(given[idx] for idx in idxs))

    return pick


def _blame(error: BaseException, one: Implementation, state: State) -> None:
    """Notes on an exception who raised it, once, whatever passes it on."""
    if one.plugin.role in ("core", "task"):
        return
    if any(note.startswith(BLAME) for note in getattr(error, "__notes__", ())):
        return
    clock = state.clock
    error.add_note(
        f"{BLAME}{one.plugin.origin} in {one.hook.name}, epoch {clock.epoch}, "
        f"batch {clock.batch}, rank {state.rank}\n"
        f"  at   {one.where}\n"
        f"  fix  switch it off with `-p no:{one.plugin.name}`"
    )


def _returned_nothing(one: Implementation) -> PluginError:
    what = "wrapper of the action" if one.wrapper else "owner of the action"
    fix = "return the result of `yield`" if one.wrapper else "return the result"
    return PluginError(
        f"the {what} {one.hook.name} returned nothing",
        plugin=one.plugin.origin,
        at=one.where,
        fix=fix if one.wrapper else f"{fix}, or pass with @hookimpl(conditional=True)",
    )
