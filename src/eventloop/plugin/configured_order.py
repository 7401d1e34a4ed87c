"""The order of plugins that a project or a site sets in `[tool.eventloop.order]`: its edges, its mistakes."""

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
    """Returns the configured edges on a hook; each name runs before all that follow it.

    An entry for the hook takes precedence over one for every hook, and the site's over both. A
    closing event takes its order from its opening event, so entries for every hook don't apply
    to it. `close` reverses such an entry.

    Args:
        closes: the event that a plugin's hook closes; known for the core's hooks.
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
                by = f"order.{key} in {value.source}"
                edges += [
                    Edge(*pair, declared_by=by, by_user=True)
                    for pair in pairs
                    if path_of(pair[1], pair[0], edges) is None
                ]
    return tuple(edges)


def order_problems(registry: Registry) -> Iterator[PluginError]:
    """Finds hooks and plugins in `order` that don't exist, and plugins that a hook doesn't call."""
    hooks = registry.hooks
    plugins = registry.names
    idle = registry.idle
    known = {fold(name) for name in plugins}
    for order in registry.rules.orders:
        for hook, value in order.items():
            if hook != EVERY_HOOK and not hooks.knows(hook):
                yield PluginError(
                    f"order names {hook!r}, but no hook has this name{hooks.hint(hook)}",
                    source=value.source,
                    fix="fix the name; list the hooks with `eventloop plugins hooks`",
                )
            named = value.value if value.source != registry.rules.site else ()
            for name in named:
                is_known = fold(name) in known
                if is_known and fold(name) not in idle(hook):
                    continue
                why = f"but no plugin has this name{closest(name, sorted(plugins))}"
                fix = "fix or remove the name; list what is installed with `eventloop plugins`"
                if is_known:
                    why = f"which doesn't implement {hook}"
                    fix = "remove the name; `eventloop plugins hooks` lists who does"
                what = f"order.{hook} names {name!r}, {why}"
                yield PluginError(what, source=value.source, fix=fix)
