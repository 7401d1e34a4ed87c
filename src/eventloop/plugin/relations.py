"""What plugins say of each other: names that are taken, what is required, what conflicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from eventloop.config.version_ranges import is_in_range, split_requirement
from eventloop.errors import PluginError
from eventloop.naming import fold
from eventloop.plugin.records import Plugin, Selected
from eventloop.plugin.select import RESERVED
from eventloop.text import pip, switch_off


def clashing_names(plugins: Iterable[Plugin]) -> Iterator[PluginError]:
    """Finds names that stand for something else, or that two plugins have."""
    by_name: dict[str, Plugin] = {}
    for plugin in plugins:
        if plugin.role == "core":
            continue
        if fold(plugin.name) in RESERVED and plugin.role != "task":
            yield PluginError(
                f"a plugin can't be named {plugin.name!r}: {' and '.join(RESERVED)} stand for "
                "something else",
                subjects=[plugin],
                plugin=plugin.origin,
                fix="give it another `name`",
            )
            continue
        other = by_name.setdefault(fold(plugin.name), plugin)
        if other is not plugin:
            yield PluginError(
                f"two plugins are named {plugin.name!r}: {other.origin} and {plugin.origin}",
                subjects=[other, plugin],
                fix="give one of them another `name`, or leave it out",
            )


def relation_problems(plugins: Sequence[Plugin], off: Sequence[Selected]) -> Iterator[PluginError]:
    """Finds plugins that need one that isn't active, or can't stand one that is."""
    active = {fold(one.name): one for one in plugins if one.role != "core"}
    reasons = {fold(one.found.name): one.reason for one in off}
    for plugin in plugins:
        for name, versions in map(_parsed, plugin.facts.requires):
            other = active.get(fold(name))
            if other is None:
                reason = reasons.get(fold(name))
                distribution = f"eventloop-{fold(name).replace('_', '-')}"
                fix = pip("install", f"{distribution}{versions}")
                yield PluginError(
                    f"{plugin.name} requires {name}{versions}, which "
                    + (f"is off: {reason}" if reason is not None else "isn't installed"),
                    subjects=[plugin],
                    plugin=plugin.origin,
                    fix=f"{'switch it on' if reason is not None else fix}, or switch "
                    f"{plugin.name} off with {switch_off(plugin.name)}",
                )
            elif other.version and not is_in_range(other.version, versions):
                fix = pip("install", f"{other.distribution}{versions}")
                yield PluginError(
                    f"{plugin.name} requires {name}{versions}, and {other.version} is installed",
                    subjects=[plugin, other],
                    plugin=plugin.origin,
                    fix=f"{fix}, or switch {plugin.name} off with {switch_off(plugin.name)}",
                )
        for name, versions in map(_parsed, plugin.facts.conflicts):
            other = active.get(fold(name))
            if other and (not versions or is_in_range(other.version, versions)):
                yield PluginError(
                    f"{plugin.name} and {other.name}{versions} can't work together, says {plugin.name}",
                    subjects=[plugin, other],
                    plugins=f"{plugin.origin}, {other.origin}",
                    fix=f"switch one off: {switch_off(plugin.name)} or {switch_off(other.name)}",
                )


def _parsed(text: str) -> tuple[str, str]:
    """Returns the name of a plugin and the versions that are meant, as `"ema>=0.2"` has them."""
    return split_requirement(text) or (text, "")
