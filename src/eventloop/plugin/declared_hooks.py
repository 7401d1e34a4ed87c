"""The hooks of a run: the core's hooks, and hooks that plugins declare with `hookspecs`."""

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
        removed: by the name of a removed hook, the text that says what replaced it.
        off: the inactive plugins; the hooks that they declare aren't available.
    """

    def __init__(
        self, hooks: Mapping[str, Hook], removed: Mapping[str, str], off: Iterable[Plugin] = ()
    ) -> None:
        super().__init__(hooks)
        self.removed = dict(removed)
        self.off = tuple(off)

    def knows(self, name: str) -> bool:
        """Returns whether a hook has this name, also if the plugin that declares it is off."""
        return name in self or self._inactive_declarer(name) is not None

    def hint(self, name: str) -> str:
        """Returns the hint for a wrong hook name: "; ..." to append to a message, or ""."""
        if name in self:
            declared_by = " and ".join(self[name].declared_by) or "the core"
            return f"; it is {a(self[name].kind)} of {declared_by}"
        if name in self.removed:
            return f"; it was {self.removed[name]}"
        if plugin := self._inactive_declarer(name):
            return f"; the plugin {plugin.name} declares it, but is off: {plugin.reason}"
        return known_as(name, HOOK_WORDS, self)

    def _inactive_declarer(self, name: str) -> Plugin | None:
        from eventloop.plugin.static_check import static_hooks  # most runs don't read sources

        for plugin in self.off:
            if plugin.found is not None and name in static_hooks(plugin.found):
                return plugin
        return None


HOOKS = HookTable(declared_hooks([Events, Actions]), REMOVED_HOOKS)


def hooks_of(
    plugins: Iterable[Plugin], off: Iterable[Plugin]
) -> tuple[HookTable, list[PluginError]]:
    """Collects the core's hooks and the hooks that plugins declare.

    Several plugins can declare the same hook, if they share one class as their `hookspecs`.

    Returns:
        The hooks, and every problem with a declaration.
    """
    hooks = HookTable(HOOKS, HOOKS.removed, off)
    problems = []
    for plugin in plugins:
        if (namespace := plugin.facts.hookspecs) is None:
            continue
        declared = declared_hooks([namespace], plugin.name)
        misfits = [*_unreadable(plugin, namespace, declared)]
        hooks.removed |= facts_of(namespace).removed_hooks or {}
        for name, hook in declared.items():
            existing = hooks.setdefault(name, hook)
            if existing is not hook and existing.spec is hook.spec:
                declared_by = (*existing.declared_by, plugin.name)
                hooks[name] = dataclasses.replace(existing, declared_by=declared_by)
            elif existing is not hook:
                misfits.append(_clash(plugin, existing))
        misfits += _misfits(declared, hooks)
        problems += [plugin.problem(*misfit) for misfit in misfits]
    return hooks, problems


# A message and a fix.
_Misfit = tuple[str, str]


def _unreadable(plugin: Plugin, namespace: Any, declared: Mapping[str, Hook]) -> Iterator[_Misfit]:
    """Finds pluggy's own markers and misspelt attributes in `hookspecs`, or that it has no hooks."""
    marked = marked_by_pluggy(namespace)
    for name in marked:
        yield (
            f"the hook {name!r} is marked with pluggy's own HookspecMarker",
            "mark it with @hookspec(per=...) of eventloop",
        )
    for name, fact in misspelt_facts(namespace):
        yield f"no attribute of hookspecs is named {name!r}; the closest is {fact!r}", "rename it"
    if not declared and not marked and facts_of(namespace).removed_hooks is None:
        yield (
            f"hookspecs of {plugin.name} declares no hooks: it is {namespace!r}",
            "put @hookspec(per=...) above its functions, or take hookspecs out",
        )


def _clash(plugin: Plugin, existing: Hook) -> _Misfit:
    declared_by = " and ".join(existing.declared_by) or "the core"
    return (
        f"the hook {existing.name!r} of {plugin.name} is declared by {declared_by} already",
        f"prefix it with the plugin's name, {fold(plugin.name)}_{existing.name}; plugins that share "
        "a hook must have the same class as their `hookspecs`",
    )


def _misfits(declared: Mapping[str, Hook], hooks: Mapping[str, Hook]) -> Iterator[_Misfit]:
    """Finds declarations that can't be called as written; yields each with a fix."""
    for name, hook in declared.items():
        parameters = list(hook.signature.parameters.values())
        if not parameters or parameters[0].name != "state":
            yield (
                f"the hook {name!r} doesn't take `state` first, which every call passes",
                f"write `def {name}(self, state, ...)`",
            )
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY):
                yield (
                    f"the hook {name!r} takes {parameter}, which no implementation would receive",
                    "write plain arguments, with or without a default",
                )
        if hook.closes and (hook.closes not in hooks or hooks[hook.closes].kind != "event"):
            yield (
                f"the hook {name!r} closes {hook.closes!r}, but no event has this name",
                "set closes=... to the event that it closes, or leave that out",
            )


def checked(hook: Hook, plan: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for `state.call` that takes arguments by position or name, with defaults.

    The defaults are the hookspec's. During the call, `state.again()` doesn't reach an outer wrapper.
    """
    signature = hook.signature

    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(state, *args, **kwargs)
        except TypeError as error:
            raise PluginError(
                f"state.call({hook.name!r}, ...): {error}",
                hook=f"{hook.name}{signature}".replace("'", ""),
                fix="pass the hook's arguments after the State, by position or by name",
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
