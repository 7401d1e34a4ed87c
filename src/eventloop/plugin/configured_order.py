"""The order of plugins that a project or a site sets in `[tool.eventloop.order]`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eventloop.errors import PluginError, closest
from eventloop.events import EVENTS_AND_QUESTIONS
from eventloop.hook_markers import Edge, path_of
from eventloop.naming import fold

if TYPE_CHECKING:
    from eventloop.config.plugin_rules import Rules
    from eventloop.plugin.registry import Registry

EVERY_HOOK = "all"


def edges_of(rules: Rules, hook: str, closes: str | None = None) -> tuple[Edge, ...]:
    """Returns the configured edges on a hook; each name runs before all names that follow it.

    An entry for the hook takes precedence over an entry for every hook, and the site's entries over
    both. A closing event takes its order from its opening event, so entries for every hook don't
    apply to it. `close` reverses an entry for every hook.

    Args:
        rules: the configuration's rules.
        hook: the name of the hook.
        closes: the event that a plugin's hook closes; not needed for the core's hooks.
    """
    edges: list[Edge] = []
    closes = EVENTS_AND_QUESTIONS[hook].closes if hook in EVENTS_AND_QUESTIONS else closes
    keys = (hook,) if closes else (hook, EVERY_HOOK)
    for order in rules.orders:
        for key in keys:
            if value := order.get(key):
                in_reverse = hook == "close" and key == EVERY_HOOK
                names = value.value[::-1] if in_reverse else value.value
                pairs = itertools.combinations(map(fold, names), 2)
                declared_by = f"order.{key} in {value.source}"
                # An edge that contradicts an earlier, stronger entry is dropped.
                edges += [
                    Edge(*pair, declared_by=declared_by, by_user=True)
                    for pair in pairs
                    if path_of(pair[1], pair[0], edges) is None
                ]
    return tuple(edges)


def order_problems(registry: Registry) -> Iterator[PluginError]:
    """Finds unknown hooks and plugins in `order`, and plugins that don't implement the hook.

    The names of plugins in a site's file aren't checked, because it is used for many environments.
    """
    hooks = registry.hooks
    plugins = registry.names
    idle = registry.idle
    folded_names = {fold(name) for name in plugins}
    for order in registry.rules.orders:
        for hook, value in order.items():
            if hook != EVERY_HOOK and not hooks.knows(hook):
                yield PluginError(
                    f"order names {hook!r}, but no hook has this name{hooks.hint(hook)}",
                    source=value.source,
                    fix="fix the name; list the hooks with `eventloop plugins hooks`",
                )
            names = value.value if value.source != registry.rules.site else ()
            for name in names:
                is_installed = fold(name) in folded_names
                if is_installed and fold(name) not in idle(hook):
                    continue
                reason = f"but no plugin has this name{closest(name, sorted(plugins))}"
                fix = "fix or remove the name; list what is installed with `eventloop plugins`"
                if is_installed:
                    reason = f"which doesn't implement {hook}"
                    fix = "remove the name; `eventloop plugins hooks` lists the plugins that do"
                message = f"order.{hook} names {name!r}, {reason}"
                yield PluginError(message, source=value.source, fix=fix)
