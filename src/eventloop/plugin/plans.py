"""Freezing: from the ordered implementations of a hook to the one function that the loop calls.

What a call means is pluggy's definition: results that aren't None are gathered in order, an
action stops at the first, wrappers enclose all plain implementations and may replace result and
exception. What a hook has no use for, such as the result of an event that a plugin calls, is an error
that names the plugin. A plan only leaves out, before the run, what the run wouldn't need: the results
of the core's events that no wrapper receives, for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from eventloop.actions import Actions
from eventloop.errors import PluginError
from eventloop.events import Events
from eventloop.hooks import TELL_ALL, Hook
from eventloop.plugin.blame import blame, enter, misfit, returned_nothing
from eventloop.plugin.calling import STATE_ALONE, Plan, adapted, direct, enclose
from eventloop.plugin.order import Implementation, order_of_owners

if TYPE_CHECKING:
    from eventloop.state import State


class Plans(Events, Actions, Protocol):
    """The plans of all hooks, by name: `plans.batch_end(state)`."""


def new_plans() -> Plans:
    """Returns an object for the plans of all hooks: a module, whose functions Python calls fastest."""
    return cast("Plans", ModuleType("plans"))


def freeze(hook: Hook, implementations: Iterable[Implementation], state: State) -> Plan:
    """Returns the plan of a hook: a function that takes the hook's arguments by position.

    Args:
        implementations: the hook's, in order, as `order` gives them.
        state: the State of the run; callbacks are given a view of it.
    """
    plain: list[Implementation] = []
    wrappers: list[Implementation] = []
    for one in implementations:
        if one.rank_zero and state.rank != 0:
            continue
        (wrappers if one.wrapper else plain).append(one)
        if one.plugin.role != "core":
            enter(one)
    if hook.name in TELL_ALL:
        return _tell_all(plain, state)
    takes_all = all(one.argnames == hook.argnames for one in plain)
    if not wrappers and len(plain) == 1 and takes_all and plain[0].plugin.role == "core":
        return plain[0].function  # which the loop may call itself
    if hook.kind == "action":
        plan = enclose(_act(order_of_owners(plain), state), wrappers, state)
        has_owner = any(not one.conditional for one in plain)
        return plan if has_owner else _answered(hook, plan)
    if not plain and not wrappers:
        return _silence(hook)
    if hook.kind == "event" and not wrappers and not hook.declared_by:
        return _tell(hook, plain, state)
    gather = enclose(_gather(hook, plain, state), wrappers, state)
    return _ask(gather) if hook.kind == "question" else gather


def told(plan: Plan, *args: Any) -> list[BaseException]:
    """Calls the plan of `exception` or `close` and returns what its implementations raised."""
    failures: list[BaseException] = plan(*args)
    return failures


def nothing(_state: object) -> None:
    """The plan of an event without implementations."""


def unanswered(_state: object) -> bool:
    """The plan of a question without implementations."""
    return False


def _silence(hook: Hook) -> Plan:
    """Returns the plan of an event, a question or a collection without implementations."""
    if hook.kind == "collection":
        return lambda *_args: []
    silent = unanswered if hook.kind == "question" else nothing
    return silent if hook.argnames == STATE_ALONE else lambda state, *_rest: silent(state)


def _tell(hook: Hook, plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all, in order; their results are ignored."""
    if hook.argnames == STATE_ALONE:
        return _tell_directly(plain, state)
    calls = [(adapted(one, state), one) for one in plain]

    def tell_each(_state: State, *rest: Any) -> None:
        for function, one in calls:
            try:
                function(*rest)
            except BaseException as error:
                blame(error, one, state)
                raise

    return tell_each


def _tell_directly(plain: Sequence[Implementation], state: State) -> Plan:
    """Does the same for events that pass the State alone, as those of every batch do.

    One function of Python's calls another, without `functools` in between: a third less. One plugin,
    and the core with one, need no loop, which takes longer than what it calls.
    """
    calls = [(*direct(one, state), one) for one in plain]
    if len(calls) == 1:
        ((only_function, only_given, only),) = calls

        def tell_one(_state: State) -> None:
            try:
                only_function(only_given)
            except BaseException as error:
                blame(error, only, state)
                raise

        return tell_one
    if len(calls) == 2:
        (first, first_given, one), (second, second_given, other) = calls

        def tell_two(_state: State) -> None:
            asked = one
            try:
                first(first_given)
                asked = other
                second(second_given)
            except BaseException as error:
                blame(error, asked, state)
                raise

        return tell_two

    def tell_each(_state: State) -> None:
        for function, given, one in calls:
            try:
                function(given)
            except BaseException as error:
                blame(error, one, state)
                raise

    return tell_each


def _gather(hook: Hook, plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all, in order, and returns their results that aren't None."""
    calls = [(adapted(one, state), one) for one in plain]
    is_question = hook.kind == "question"
    is_event = hook.kind == "event" and bool(hook.declared_by)

    def gather(_state: State, *rest: Any) -> list[Any]:
        results = []
        for function, one in calls:
            try:
                result = function(*rest)
                if result is None:
                    continue
                if is_event or (is_question and result is not True and result is not False):
                    raise misfit(result, one)
            except BaseException as error:
                blame(error, one, state)
                raise
            results.append(result)
        return results

    return gather


def _ask(gather: Plan) -> Plan:
    """Reduces the answers to one: any True means yes."""

    def ask(*args: Any) -> bool:
        return True in gather(*args)

    return ask


def _act(plain: Sequence[Implementation], state: State) -> Plan:
    """Asks the conditional ones, then the owner, and returns the first result."""
    owner_idx = next((i for i, one in enumerate(plain) if not one.conditional), len(plain))
    asked = plain[: owner_idx + 1]
    if asked and asked[0].hook.argnames == STATE_ALONE:
        return _act_directly(asked, state)
    calls = [(adapted(one, state), one) for one in asked]

    def act(_state: State, *rest: Any) -> Any:
        for function, one in calls:
            try:
                result = function(*rest)
                if result is None and not one.conditional:
                    raise returned_nothing(one)
            except BaseException as error:
                blame(error, one, state)
                raise
            if result is not None:
                return result
        return None

    return act


def _act_directly(asked: Sequence[Implementation], state: State) -> Plan:
    """Does the same for actions that pass the State alone, as `_gather_directly` does."""
    calls = [(*direct(one, state), one) for one in asked]

    def act(_state: State) -> Any:
        for function, given, one in calls:
            try:
                result = function(given)
                if result is None and not one.conditional:
                    raise returned_nothing(one)
            except BaseException as error:
                blame(error, one, state)
                raise
            if result is not None:
                return result
        return None

    return act


def _answered(hook: Hook, plan: Plan) -> Plan:
    """Refuses silence where an action has no owner, so that nothing is left undone unseen."""

    def answered(*args: Any) -> Any:
        result = plan(*args)
        if result is None:
            raise PluginError(
                f"no plugin answered the action {hook.name}",
                fix=f"implement {hook.name} in the task or in an algorithm",
            )
        return result

    return answered


def _tell_all(plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all, whatever any of them raises, and returns what they raised."""
    calls = [(adapted(one, state), one) for one in plain]

    def tell_all(_state: State, *rest: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        for function, one in calls:
            try:
                function(*rest)
            except BaseException as error:  # noqa: BLE001  all are told before any is raised
                blame(error, one, state)
                failures.append(error)
        return failures

    return tell_all
