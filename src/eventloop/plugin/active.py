"""The plugins that take part in a run now, and the plans of all hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.assembly import Assembly, OrderPreferences
from eventloop.plugin.declared import HOOKS, checked
from eventloop.plugin.observe import Around, Observer, observe
from eventloop.plugin.plans import freeze, new_plans, nothing
from eventloop.state import CALLABLE

if TYPE_CHECKING:
    from torch import Tensor

    from eventloop.state import State


class ActivePlugins:
    """The plugins that take part in a run now, and the plans of all hooks.

    One object a run, which the core's plugins and the State hold from the start. Empty before
    `freeze`, which is called again when a plugin has dropped out.

    Attributes:
        assembly: what the plugins implement, in order.
        plans: the plans of all hooks.
        quiet: the same plans, with nothing for the events of a microbatch.
        by_name: the plugins themselves by folded name, without the core's.
        evaluates: whether a plugin evaluates by itself, with eval data or without.
    """

    __slots__ = ("_callable", "assembly", "by_name", "evaluates", "plans", "quiet")

    def __init__(self) -> None:
        self.assembly = Assembly((), (), HOOKS, {}, OrderPreferences())
        self.plans = new_plans()
        self.quiet = new_plans()
        self.by_name: Mapping[str, Any] = {}
        self.evaluates = False
        self._callable: Mapping[str, Callable[..., Any]] = {}

    def freeze(self, assembly: Assembly, state: State, observers: Sequence[Observer]) -> None:
        """Makes the plans of all hooks.

        Args:
            observers: what is put around the implementations.
        """
        self.assembly = assembly
        enters = (one.facts.around_calls for one in assembly.plugins)
        observers = (*observers, *(Around(one) for one in enters if one))
        for name, hook in assembly.hooks.items():
            implementations = assembly.implementations[name].implementations
            if observers:
                implementations = observe(implementations, observers)
            plan = state.precision.enclose(name, freeze(hook, implementations, state))
            setattr(self.plans, name, plan)
            is_quiet = hook.kind == "event" and hook.per == "microbatch"
            setattr(self.quiet, name, nothing if is_quiet else plan)
        self.evaluates = assembly.evaluates
        plugins = (one for one in assembly.plugins if one.role != "core")
        self.by_name = {fold(one.name): one.target for one in plugins}
        self._callable = {
            name: checked(hook, getattr(self.plans, name))
            for name, hook in assembly.hooks.items()
            if hook.declared_by or name in CALLABLE
        }

    def unwrapped_loss(self, state: State) -> Callable[[State], Tensor]:
        """Returns what computes the loss in evaluation: without what plugins wrap around it."""
        owners = [one for one in self.assembly.implementations["loss"] if not one.wrapper]
        return state.precision.enclose("loss", freeze(self.assembly.hooks["loss"], owners, state))

    def plan_to_call(self, hook: str) -> Callable[..., Any]:
        """Returns what calls a hook that plugins declare, or one of those in `CALLABLE`.

        Raises:
            PluginError: no active plugin declares such a hook; the loop's own are the loop's to call.
        """
        if hook not in self._callable:
            raise PluginError(
                f"no active plugin declares a hook {hook!r}{self.assembly.hooks.hint(hook)}",
                fix="declare it in a module or class that is the plugin's `hookspecs`",
            )
        return self._callable[hook]
