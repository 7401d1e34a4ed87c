"""Freezing: from the ordered implementations of a hook to the one function that the loop calls.

Calls have pluggy's semantics: results that aren't None are collected in order, an action stops at
the first result, wrappers enclose all plain implementations and can replace results and exceptions.
An implementation that returns a result its hook can't use, such as any result of an event, raises
an error that names the plugin. A plan omits only work that the run doesn't need.
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
    from eventloop.plugin.records import Plugin
    from eventloop.state import State


class Plans(Events, Actions, Protocol):
    """The plans of all hooks, by name: `plans.batch_end(state)`."""


# If a plugin raises in one of these events, the next fit continues with that plugin: the clock has
# counted the batch or epoch already, so the plugins after it would otherwise never be called for it.
RESUMABLE = ("batch_end", "batch_checkpoint", "epoch_end", "epoch_checkpoint")


def new_plans() -> Plans:
    """Returns an empty object for the plans.

    It is a module, because Python calls functions of modules fastest.
    """
    return cast("Plans", ModuleType("plans"))


def freeze(
    hook: Hook,
    implementations: Iterable[Implementation],
    state: State,
    raised: dict[str, Implementation] | None = None,
) -> Plan:
    """Returns the plan of a hook: a function that takes the hook's arguments by position.

    Args:
        implementations: of the hook, as ordered by `order`.
        state: the State of the run; callbacks get a view of it.
        raised: receives the implementation that raised, by the event's name.
    """
    raised = {} if raised is None else raised
    plain: list[Implementation] = []
    wrappers: list[Implementation] = []
    for impl in implementations:
        if impl.rank_zero and state.rank != 0:
            continue
        (wrappers if impl.wrapper else plain).append(impl)
        if impl.plugin.role != "core":
            enter(impl)
    if hook.name in TELL_ALL:
        return _tell_all(plain, state)
    if hook.name in OF_ITSELF:
        return _ask_each(hook, plain, state)
    is_cores = not wrappers and len(plain) == 1 and plain[0].plugin.role == "core"
    if is_cores and plain[0].argnames == hook.argnames:
        # The core's implementation is called without a layer in between; this also lets the loop
        # recognise it by identity.
        return plain[0].function
    if hook.kind == "action":
        plan = enclose(_act(order_of_owners(plain), state), wrappers, state)
        has_owner = any(not impl.conditional for impl in plain)
        return plan if has_owner else _answered(hook, plan)
    if not plain and not wrappers:
        return _silence(hook)
    if hook.kind == "event" and not wrappers:
        return _tell(hook, plain, state, raised)
    gather = enclose(_gather(hook, plain, state, raised), wrappers, state)
    return _ask(gather) if hook.kind == "question" else gather


def outcomes_of(plan: Plan, *args: Any) -> list[Any]:
    """Calls the plan of a hook of `TELL_ALL` or `OF_ITSELF`.

    Returns:
        For `TELL_ALL`, the exceptions; for `OF_ITSELF`, (plugin, text) pairs.
    """
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
    plan = unanswered if hook.kind == "question" else nothing
    return plan if hook.argnames == STATE_ALONE else lambda state, *_arguments: plan(state)


def _tell(
    hook: Hook,
    plain: Sequence[Implementation],
    state: State,
    raised: dict[str, Implementation],
) -> Plan:
    """Calls all implementations in order.

    A result is an error, because nothing would receive it.
    """
    if hook.argnames == STATE_ALONE:
        return _tell_directly(plain, state, raised)
    calls = [(adapted(impl, state), impl) for impl in plain]

    def tell_each(_state: State, *arguments: Any) -> None:
        for function, impl in calls:
            try:
                result = function(*arguments)
                if result is not None:
                    raise misfit(result, impl)
            except BaseException as error:
                raised[hook.name] = impl
                blame(error, impl, state)
                raise

    return tell_each


def _tell_directly(
    plain: Sequence[Implementation], state: State, raised: dict[str, Implementation]
) -> Plan:
    """Same as `_tell`, for events that pass only the State, such as the events of each batch.

    Calling Python functions without `functools.partial` takes a third less time.
    """
    calls = [(*direct(impl, state), impl) for impl in plain]

    def tell_each(_state: State) -> None:
        for function, argument, impl in calls:
            try:
                result = function(argument)
                if result is not None:
                    raise misfit(result, impl)
            except BaseException as error:
                raised[impl.hook.name] = impl
                blame(error, impl, state)
                raise

    return tell_each


def _gather(
    hook: Hook,
    plain: Sequence[Implementation],
    state: State,
    raised: dict[str, Implementation] | None = None,
) -> Plan:
    """Calls all implementations in order and returns the results that aren't None."""
    calls = [(adapted(impl, state), impl) for impl in plain]
    is_question = hook.kind == "question"
    is_event = hook.kind == "event"
    is_text = hook.name in OF_ITSELF

    def gather(_state: State, *arguments: Any) -> list[Any]:
        results = []
        for function, impl in calls:
            try:
                result = function(*arguments)
                if result is None:
                    continue
                is_wrong = is_event or (is_text and not isinstance(result, str))
                if is_wrong or (is_question and result is not True and result is not False):
                    raise misfit(result, impl)
            except BaseException as error:
                if raised is not None:
                    raised[hook.name] = impl
                blame(error, impl, state)
                raise
            results.append(result)
        return results

    return gather


def _ask_each(hook: Hook, plain: Sequence[Implementation], state: State) -> Plan:
    """Calls all implementations in order and returns (plugin, text) for each non-empty answer."""
    gathers = [(impl.plugin, _gather(hook, [impl], state)) for impl in plain]

    def ask_each(_state: State) -> list[tuple[Plugin, str]]:
        answers = []
        for plugin, gather in gathers:
            answers += [(plugin, text) for text in gather(state) if text]
        return answers

    return ask_each


def _ask(gather: Plan) -> Plan:
    """Turns the answers to a question into one bool: whether any of them is True."""

    def ask(*args: Any) -> bool:
        return True in gather(*args)

    return ask


def _act(plain: Sequence[Implementation], state: State) -> Plan:
    """Calls the conditional implementations, then the owner's, and returns the first result."""
    # Implementations after the owner's are never reached, so the plan doesn't hold them.
    owner_idx = next((i for i, impl in enumerate(plain) if not impl.conditional), len(plain))
    impls = plain[: owner_idx + 1]
    if impls and impls[0].hook.argnames == STATE_ALONE:
        return _act_directly(impls, state)
    calls = [(adapted(impl, state), impl) for impl in impls]

    def act(_state: State, *arguments: Any) -> Any:
        for function, impl in calls:
            try:
                result = function(*arguments)
                if result is None and not impl.conditional:
                    raise returned_nothing(impl)
            except BaseException as error:
                blame(error, impl, state)
                raise
            if result is not None:
                return result
        return None

    return act


def _act_directly(impls: Sequence[Implementation], state: State) -> Plan:
    """Same as `_act`, for actions that pass only the State; see `_tell_directly`."""
    calls = [(*direct(impl, state), impl) for impl in impls]

    def act(_state: State) -> Any:
        for function, argument, impl in calls:
            try:
                result = function(argument)
                if result is None and not impl.conditional:
                    raise returned_nothing(impl)
            except BaseException as error:
                blame(error, impl, state)
                raise
            if result is not None:
                return result
        return None

    return act


def _answered(hook: Hook, plan: Plan) -> Plan:
    """Wraps a plan of an action, to raise if no implementation returns a result."""

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
    calls = [(adapted(impl, state), impl) for impl in plain]

    def tell_all(_state: State, *arguments: Any) -> list[BaseException]:
        failures: list[BaseException] = []
        for function, impl in calls:
            try:
                result = function(*arguments)
                if result is not None:
                    raise misfit(result, impl)
            except BaseException as error:  # noqa: BLE001  the other plugins must be called, too
                blame(error, impl, state)
                failures.append(error)
        return failures

    return tell_all


class ActivePlugins:
    """The active plugins of a run, and the plans of all hooks.

    There is one object per run, shared by the core's plugins and the State. It is empty before
    `freeze`, which is called again after a plugin has dropped out.

    Attributes:
        assembly: the implementations of the plugins, in order.
        plans: the plans of all hooks.
        quiet: the same plans, except that the events of a microbatch do nothing.
        by_name: the plugin objects by folded name, without the core's.
        facts: the facts of these plugins, by folded name.
        evaluates: whether a plugin evaluates, even without eval data.
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
            assembly: the plugins, and their implementations in order.
            state: the State of the run.
            observers: wrap the implementations; the plugins' own `around_calls` come last.
        """
        self.assembly = assembly
        for plugin in assembly.plugins:
            if plugin.facts.around_calls:
                observers = (*observers, Around(plugin.facts.around_calls))
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
        plugins = [plugin for plugin in assembly.plugins if plugin.role != "core"]
        self.by_name = {fold(plugin.name): plugin.target for plugin in plugins}
        self.facts = {fold(plugin.name): plugin.facts for plugin in plugins}
        self._callable = {
            name: checked(hook, getattr(self.plans, name))
            for name, hook in assembly.hooks.items()
            if hook.declared_by or name in CALLABLE
        }

    def continue_events(self, state: State) -> None:
        """Makes the next call of an event that raised begin with the implementation that raised.

        The implementations before it have been called for this batch or epoch, and aren't called
        twice. Wrappers of the event enclose the remaining implementations.
        """
        raised = {name: self._raised[name] for name in RESUMABLE if name in self._raised}
        self._raised.clear()
        for name, implementation in raised.items():
            frozen = self._frozen[name]
            start = next(i for i, impl in enumerate(frozen) if impl is implementation)
            remaining = [impl for idx, impl in enumerate(frozen) if impl.wrapper or idx >= start]
            plan = freeze(self.assembly.hooks[name], remaining, state, self._raised)
            self._call_once(name, state.precision.enclose(name, plan))

    def _call_once(self, name: str, plan: Plan) -> None:
        """Replaces the plan of a hook for its next call."""
        full_plan = getattr(self.plans, name)

        def call_once(*args: Any) -> Any:
            setattr(self.plans, name, full_plan)
            return plan(*args)

        setattr(self.plans, name, call_once)

    def calling_plugin(self) -> str | None:
        """Returns the plugin whose implementation is running, with its package and version.

        Returns None if no implementation is running in this thread, or if it is the core's. Walks
        the stack, so don't call it for every batch.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            for impl in implementations_of(frame):
                if impl.plugin in self.assembly.plugins:
                    return None if impl.plugin.role == "core" else impl.plugin.origin
            frame = frame.f_back
        return None

    def plugins_that_answer(self, question: str, state: State) -> list[str]:
        """Asks each plugin a question again; returns the origins of those that answer True."""
        hook = self.assembly.hooks[question]
        origins = []
        for impl in self._frozen[question]:
            if impl.wrapper or impl.plugin.role == "core":
                continue
            ask = freeze(hook, [impl], state)
            if ask(state):
                origins.append(impl.plugin.origin)
        return origins

    def unwrapped(self, action: str, state: State) -> Callable[..., Any]:
        """Returns the plan of an action without the wrappers that plugins put around it."""
        owners = [impl for impl in self.assembly.implementations[action] if not impl.wrapper]
        return state.precision.enclose(action, freeze(self.assembly.hooks[action], owners, state))

    def plan_to_call(self, hook: str) -> Callable[..., Any]:
        """Returns the plan of a hook that plugins declare, or of a core hook in `CALLABLE`.

        Raises:
            PluginError: no active plugin declares the hook. The loop's own hooks aren't available
                here, because only the loop may call them.
        """
        if hook not in self._callable:
            raise PluginError(
                f"no active plugin declares a hook {hook!r}{self.assembly.hooks.hint(hook)}",
                fix="declare it in a module or class that is the plugin's `hookspecs`",
            )
        return self._callable[hook]
