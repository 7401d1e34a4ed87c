"""The hooks of a run: the core's, and those declared by plugins with `hookspecs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eventloop.actions import Actions
from eventloop.errors import PluginError, a
from eventloop.events import Events
from eventloop.hook_markers import REMOVED_HOOKS, Hook, declared_hooks, marked_by_pluggy
from eventloop.naming import fold
from eventloop.plugin.plugin_attributes import facts_of, misspelt_facts
from eventloop.vocabulary import HOOK_WORDS, known_as

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin
    from eventloop.state import State


class HookTable(dict[str, Hook]):
    """Hooks by name.

    Args:
        hooks: the available hooks.
        removed: what replaced each removed hook.
        off: the inactive plugins; the hooks that they declare aren't available.
    """

    def __init__(
        self, hooks: Mapping[str, Hook], removed: Mapping[str, str], off: Iterable[Plugin] = ()
    ) -> None:
        super().__init__(hooks)
        self.removed = dict(removed)
        self.off = tuple(off)

    def knows(self, name: str) -> bool:
        """Returns whether there is a hook with this name, or would be if a plugin weren't off."""
        return name in self or self._declared_by_one_off(name) is not None

    def hint(self, name: str) -> str:
        """Returns the hint for an unknown hook's name, "; ..." or ""."""
        if name in self:
            by = " and ".join(self[name].declared_by) or "the core"
            return f"; it is {a(self[name].kind)} of {by}"
        if name in self.removed:
            return f"; it was {self.removed[name]}"
        if one := self._declared_by_one_off(name):
            return f"; the plugin {one.name} declares it, but is off: {one.reason}"
        return known_as(name, HOOK_WORDS, self)

    def _declared_by_one_off(self, name: str) -> Plugin | None:
        from eventloop.plugin.static_check import static_hooks  # reads sources: a run needn't

        for plugin in self.off:
            if plugin.found is not None and name in static_hooks(plugin.found):
                return plugin
        return None


HOOKS = HookTable(declared_hooks([Events, Actions]), REMOVED_HOOKS)


def hooks_of(
    plugins: Iterable[Plugin], off: Iterable[Plugin]
) -> tuple[HookTable, list[PluginError]]:
    """Collects the core's hooks and those that plugins declare; several can declare the same hook.

    Returns:
        The hooks, and every problem with a declaration.
    """
    hooks = HookTable(HOOKS, HOOKS.removed, off)
    problems = []
    for plugin in plugins:
        if (namespace := plugin.facts.hookspecs) is None:
            continue
        own = declared_hooks([namespace], plugin.name)
        misfits = [*_unreadable(plugin, namespace, own)]
        hooks.removed |= facts_of(namespace).removed_hooks or {}
        for name, hook in own.items():
            known = hooks.setdefault(name, hook)
            if known is not hook and known.spec is hook.spec:
                by = (*known.declared_by, plugin.name)
                hooks[name] = dataclasses.replace(known, declared_by=by)
            elif known is not hook:
                misfits.append(_clash(plugin, known))
        misfits += _misfits(own, hooks)
        problems += [plugin.problem(*misfit) for misfit in misfits]
    return hooks, problems


# What is wrong, and how to fix it.
_Misfit = tuple[str, str]


def _unreadable(plugin: Plugin, namespace: Any, own: Mapping[str, Hook]) -> Iterator[_Misfit]:
    """Finds what `hookspecs` has that can't be read: markers of pluggy, misspelt names, nothing."""
    marked = marked_by_pluggy(namespace)
    for name in marked:
        yield (
            f"the hook {name!r} is marked with pluggy's own HookspecMarker",
            "mark it with @hookspec(per=...) of eventloop",
        )
    for name, fact in misspelt_facts(namespace):
        yield f"no attribute of hookspecs is named {name!r}; the closest is {fact!r}", "rename it"
    if not own and not marked and facts_of(namespace).removed_hooks is None:
        yield (
            f"hookspecs of {plugin.name} declares no hooks: it is {namespace!r}",
            "put @hookspec(per=...) above its functions, or take hookspecs out",
        )


def _clash(plugin: Plugin, known: Hook) -> _Misfit:
    by = " and ".join(known.declared_by) or "the core"
    return (
        f"the hook {known.name!r} of {plugin.name} is declared by {by} already",
        f"give it the plugin's name, {fold(plugin.name)}_{known.name}; plugins that mean the same "
        "hook share one class as their `hookspecs`",
    )


def _misfits(own: Mapping[str, Hook], hooks: Mapping[str, Hook]) -> Iterator[_Misfit]:
    """Finds declarations that can't be called as written, each with a fix."""
    for name, hook in own.items():
        parameters = list(hook.signature.parameters.values())
        if not parameters or parameters[0].name != "state":
            yield (
                f"the hook {name!r} doesn't take `state` first, which every call passes",
                f"write `def {name}(self, state, ...)`",
            )
        for one in parameters:
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY):
                yield (
                    f"the hook {name!r} takes {one}, which no implementation would get",
                    "write plain arguments, with or without a default",
                )
        if hook.closes and (hook.closes not in hooks or hooks[hook.closes].kind != "event"):
            yield (
                f"the hook {name!r} closes {hook.closes!r}, but no event has this name",
                "name the event that it ends in closes=..., or leave that out",
            )


def checked(hook: Hook, plan: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a plan for `state.call`: arguments by position or name, with the spec's defaults.

    In the call, `state.again()` of an outer wrapper has no effect.
    """
    signature = hook.signature

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(state, *args, **kwargs)
        except TypeError as error:
            raise PluginError(
                f"state.call({hook.name!r}, ...): {error}",
                hook=f"{hook.name}{signature}".replace("'", ""),
                fix="pass what the hook takes beside the State, by position or by name",
            ) from None
        bound.apply_defaults()
        outer = state.enclosed
        state.enclosed = None
        try:
            result = plan(*bound.args)
        finally:
            state.enclosed = outer
        return None if hook.kind == "event" else result

    return call
