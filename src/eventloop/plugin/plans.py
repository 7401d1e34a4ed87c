"""Freezing: from the ordered implementations of a hook to the one function that the loop calls.

Calls have pluggy's semantics: results that aren't None are collected in order, an action stops at
the first one, wrappers enclose all plain implementations and can replace result and exception. A
result that a hook can't use, such as that of an event called by a plugin, is an error that names
the plugin. A plan only omits work that the run doesn't need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, cast

from eventloop.actions import Actions
from eventloop.errors import PluginError
from eventloop.events import Events
from eventloop.hook_markers import OF_ITSELF, TELL_ALL, Hook
from eventloop.naming import fold
from eventloop.plugin.calling import STATE_ALONE, Plan, adapted, direct, enclose
from eventloop.plugin.declared_hooks import checked
from eventloop.plugin.hook_errors import (
    blame,
    enter,
    implementations_of,
    misfit,
    returned_nothing,
)
from eventloop.plugin.observe import Around, Observer, observe
from eventloop.plugin.order import Implementation, order_of_owners
from eventloop.plugin.registry import Registry
from eventloop.state import CALLABLE

if TYPE_CHECKING:
    from eventloop.plugin.plugin_attributes import PluginFacts
    from eventloop.state import State


class Plans(Events, Actions, Protocol):
    """The plans of all hooks, by name: `plans.batch_end(state)`."""


# The events that go on, in the next fit, with the plugin that raised.
RESUMABLE = ("batch_end", "batch_checkpoint", "epoch_end", "epoch_checkpoint")


def new_plans() -> Plans:
    """Returns an object for the plans: a module, as Python calls its functions fastest."""
    return cast("Plans", ModuleType("plans"))


def freeze(
    hook: Hook,
    implementations: Iterable[Implementation],
    state: State,
    raised: dict[str, Implementation] | None = None,
) -> Plan:
    """Returns the plan of a hook: a function that takes the hook's arguments by position.

    Args:
        implementations: the hook's, as ordered by `order`.
        state: the State of the run; callbacks get a view of it.
        raised: takes the implementation that an event raised on, by the hook's name.
    """
    raised = {} if raised is None else raised
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
    if hook.name in OF_ITSELF:
        return _ask_each(hook, plain, state)
    is_cores = not wrappers and len(plain) == 1 and plain[0].plugin.role == "core"
    if is_cores and plain[0].argnames == hook.argnames:
        return plain[0].function  # which the loop may call itself
    if hook.kind == "action":
        plan = enclose(_act(order_of_owners(plain), state), wrappers, state)
        has_owner = any(not one.conditional for one in plain)
        return plan if has_owner else _answered(hook, plan)
    if not plain and not wrappers:
        return _silence(hook)
    if hook.kind == "event" and not wrappers:
        return _tell(hook, plain, state, raised)
    gather = enclose(_gather(hook, plain, state, raised), wrappers, state)
    return _ask(gather) if hook.kind == "question" else gather


def outcomes_of(plan: Plan, *args: Any) -> list[Any]:
    """Calls a plan of `TELL_ALL`, for its exceptions, or of `OF_ITSELF`, for (plugin, text) pairs."""
    results: list[Any] = plan(*args)
    return results


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


def _tell(
    hook: Hook,
    plain: Sequence[Implementation],
    state: State,
    raised: dict[str, Implementation],
) -> Plan:
    """Calls all implementations in order; a result is an error, because nothing would receive it."""
    if hook.argnames == STATE_ALONE:
        return _tell_directly(plain, state, raised)
    calls = [(adapted(one, state), one) for one in plain]

    def tell_each(_state: State, *rest: Any) -> None:
        for function, one in calls:
            try:
                result = function(*rest)
                if result is not None:
                    raise misfit(result, one)
            except BaseException as error:
                raised[hook.name] = one
                blame(error, one, state)
                raise

    return tell_each


def _tell_directly(
    plain: Sequence[Implementation], state: State, raised: dict[str, Implementation]
) -> Plan:
    """Does the same for events that pass only the State, as those of every batch do.

    Calling Python functions without `functools` takes a third less.
    """
    calls = [(*direct(one, state), one) for one in plain]

    def tell_each(_state: State) -> None:
        for function, argument, one in calls:
            try:
                result = function(argument)
                if result is not None:
                    raise misfit(result, one)
            except BaseException as error:
                raised[one.hook.name] = one
                blame(error, one, state)
                raise

    return tell_each


def _gather(
    hook: Hook,
    plain: Sequence[Implementation],
    state: State,
    raised: dict[str, Implementation] | None = None,
) -> Plan:
    """Calls all implementations in order and returns the results that aren't None."""
    calls = [(adapted(one, state), one) for one in plain]
    is_question = hook.kind == "question"
    is_event = hook.kind == "event"
    is_text = hook.name in OF_ITSELF

    def gather(_state: State, *rest: Any) -> list[Any]:
        results = []
        for function, one in calls:
            try:
                result = function(*rest)
                if result is None:
                    continue
                is_wrong = is_event or (is_text and not isinstance(result, str))
                if is_wrong or (is_question and result is not True and result is not False):
                    raise misfit(result, one)
            except BaseException as error:
                if raised is not None:
                    raised[hook.name] = one
                blame(error, one, state)
                raise
            results.append(result)
        return results

    return gather


def _ask_each(hook: Hook, plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all implementations in order and returns each plugin that answers with its text."""
    gathers = [(one.plugin, _gather(hook, [one], state)) for one in plain]
    return lambda _state: [(one, text) for one, each in gathers for text in each(state) if text]


def _ask(gather: Plan) -> Plan:
    """Returns whether any answer is True."""

    def ask(*args: Any) -> bool:
        return True in gather(*args)

    return ask


def _act(plain: Sequence[Implementation], state: State) -> Plan:
    """Calls the conditional implementations, then the owner's, and returns the first result."""
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
    """Does the same for actions that pass only the State, as `_tell_directly` does for events."""
    calls = [(*direct(one, state), one) for one in asked]

    def act(_state: State) -> Any:
        for function, argument, one in calls:
            try:
                result = function(argument)
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
    """Raises if no implementation of an action returns a result."""

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
    """Calls all implementations, even if some raise, and returns the exceptions."""
    calls = [(adapted(one, state), one) for one in plain]

    def tell_all(_state: State, *rest: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        for function, one in calls:
            try:
                result = function(*rest)
                if result is not None:
                    raise misfit(result, one)
            except BaseException as error:  # noqa: BLE001  all are told before any is raised
                blame(error, one, state)
                failures.append(error)
        return failures

    return tell_all


class ActivePlugins:
    """The active plugins of a run, and the plans of all hooks.

    One object per run, shared by the core's plugins and the State. Empty before `freeze`, which is
    called again when a plugin has dropped out.

    Attributes:
        assembly: the implementations of the plugins, in order.
        plans: the plans of all hooks.
        quiet: the same plans, with empty ones for the events of a microbatch.
        by_name: the plugin objects by folded name, without the core's; likewise `facts`.
        evaluates: whether a plugin evaluates by itself, with or without eval data.
    """

    __slots__ = (
        "_callable",
        "_frozen",
        "_raised",
        "assembly",
        "by_name",
        "evaluates",
        "facts",
        "plans",
        "quiet",
    )

    def __init__(self) -> None:
        self.assembly = Registry()
        self.plans = new_plans()
        self.quiet = new_plans()
        self.by_name: Mapping[str, Any] = {}
        self.facts: Mapping[str, PluginFacts] = {}
        self.evaluates = False
        self._callable: Mapping[str, Callable[..., Any]] = {}
        self._frozen: dict[str, Sequence[Implementation]] = {}
        self._raised: dict[str, Implementation] = {}

    def freeze(self, assembly: Registry, state: State, observers: Sequence[Observer]) -> None:
        """Creates the plans of all hooks.

        Args:
            observers: wrap the implementations.
        """
        self.assembly = assembly
        enters = (one.facts.around_calls for one in assembly.plugins)
        observers = (*observers, *(Around(one) for one in enters if one))
        for name, hook in assembly.hooks.items():
            implementations = assembly.implementations[name].implementations
            if observers:
                implementations = observe(implementations, observers)
            self._frozen[name] = tuple(implementations)
            frozen = freeze(hook, implementations, state, self._raised)
            plan = state.precision.enclose(name, frozen)
            setattr(self.plans, name, plan)
            is_quiet = hook.kind == "event" and hook.per == "microbatch"
            setattr(self.quiet, name, nothing if is_quiet else plan)
        self.evaluates = assembly.evaluates
        plugins = [one for one in assembly.plugins if one.role != "core"]
        self.by_name = {fold(one.name): one.target for one in plugins}
        self.facts = {fold(one.name): one.facts for one in plugins}
        self._callable = {
            name: checked(hook, getattr(self.plans, name))
            for name, hook in assembly.hooks.items()
            if hook.declared_by or name in CALLABLE
        }

    def continue_events(self, state: State) -> None:
        """Has the next call of an event that raised begin with the implementation that raised.

        Those before it have been called for this batch or epoch, and aren't called twice. Wrappers
        of the event enclose what is left.
        """
        raised = {name: self._raised[name] for name in RESUMABLE if name in self._raised}
        self._raised.clear()
        for name, implementation in raised.items():
            frozen = self._frozen[name]
            position = next(i for i, other in enumerate(frozen) if other is implementation)
            left = [other for idx, other in enumerate(frozen) if other.wrapper or idx >= position]
            rest = freeze(self.assembly.hooks[name], left, state, self._raised)
            self._call_once(name, state.precision.enclose(name, rest))

    def _call_once(self, name: str, plan: Plan) -> None:
        """Puts a plan in the place of another, for one call."""
        usual = getattr(self.plans, name)

        def call_once(*args: Any) -> Any:
            setattr(self.plans, name, usual)
            return plan(*args)

        setattr(self.plans, name, call_once)

    def calling_plugin(self) -> str | None:
        """Returns the plugin whose implementation is under way, with its package and version.

        Returns None if there is none in this thread, or it is the core's. Walks the stack, so call it
        for what is rare.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            for one in implementations_of(frame):
                if one.plugin in self.assembly.plugins:
                    return None if one.plugin.role == "core" else one.plugin.origin
            frame = frame.f_back
        return None

    def plugins_that_answer(self, question: str, state: State) -> list[str]:
        """Asks each plugin a question again; returns those that answer it with True."""
        hook = self.assembly.hooks[question]
        asked = [
            one for one in self._frozen[question] if not one.wrapper and one.plugin.role != "core"
        ]
        return [one.plugin.origin for one in asked if freeze(hook, [one], state)(state)]

    def unwrapped(self, action: str, state: State) -> Callable[..., Any]:
        """Returns the plan of an action as its owner answers it, without the plugins' wrappers."""
        owners = [one for one in self.assembly.implementations[action] if not one.wrapper]
        return state.precision.enclose(action, freeze(self.assembly.hooks[action], owners, state))

    def plan_to_call(self, hook: str) -> Callable[..., Any]:
        """Returns the plan of a hook that plugins declare, or of one in `CALLABLE`.

        Raises:
            PluginError: no active plugin declares the hook; only the loop calls its own hooks.
        """
        if hook not in self._callable:
            raise PluginError(
                f"no active plugin declares a hook {hook!r}{self.assembly.hooks.hint(hook)}",
                fix="declare it in a module or class that is the plugin's `hookspecs`",
            )
        return self._callable[hook]
