"""Plugins that are objects, passed to `Trainer`, provided by the task, or added by a command's flag."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from eventloop.errors import PluginError, a
from eventloop.fixes import shell
from eventloop.naming import camel, fold, kebab
from eventloop.plugin.build import stored_options
from eventloop.plugin.choose import ban, is_switched_off
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.plugin_attributes import facts_of
from eventloop.plugin.records import Found, Plugin
from eventloop.plugin.validate import takes_part

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration


def passed_plugins(
    objects: Iterable[object],
    role: Literal["algorithm", "callback"],
    found: Sequence[Found],
    by: Literal["Task", "Trainer"] = "Trainer",
) -> list[Plugin]:
    """Returns a `Plugin` for each object.

    A plugin's name is its class's entry point name, or else its attribute `name`, or else its
    class's name in kebab-case.

    Args:
        objects: the plugin objects; for a command's flag, a `Plugin` without a name.
        role: the role of the plugins.
        found: the discovered plugins, for the names of entry points.
        by: the caller that provides the objects.
    """
    plugins = []
    for passed in objects:
        plugin = passed
        if not isinstance(plugin, Plugin):
            plugin = Plugin("", role, passed, source=f"{by}({role}s=...)", by=by)
        target = plugin.target
        entry = _found_as(target, found)
        plugins.append(
            replace(
                plugin,
                name=_name_of(target) if entry is None else entry.name,
                distribution="" if entry is None else entry.distribution,
                version="" if entry is None else entry.version,
                options=stored_options(target),
            )
        )
    return plugins


def accept(
    plugins: Iterable[Plugin], configuration: Configuration
) -> tuple[list[Plugin], list[PluginError]]:
    """Decides which passed plugins take part.

    Returns:
        The accepted plugins, with the stage "off" for a task's plugin that a flag switches off; and
        a problem for each object that isn't a plugin or that the site forbids.
    """
    accepted = []
    not_plugins = []
    forbidden = []
    for plugin in sorted(plugins, key=lambda plugin: (plugin.role, fold(plugin.name))):
        if plugin.by == "Task" and is_switched_off(plugin.name, configuration.choice):
            reason = f"-p no:{plugin.name}"
            accepted.append(replace(plugin, stage="off", reason=reason, kind="flag"))
            continue
        if isinstance(plugin.target, type) or not takes_part(plugin, HOOKS):
            not_plugins.append(_without_hooks(plugin))
        else:
            accepted.append(plugin)
        if ban_reason := ban(plugin.name, configuration.rules, by_site=True):
            forbidden.append(
                PluginError(
                    f"{plugin.name} was passed, but the site switches it off: {ban_reason.text}",
                    subjects=[plugin],
                    plugin=plugin.origin,
                    fix="leave it out; the site's rules can't be overruled",
                )
            )
    return accepted, [*not_plugins, *forbidden]


def _found_as(target: object, plugins: Sequence[Found]) -> Found | None:
    """Finds the entry point of an object's class, under any exported name.

    Imports nothing: the object exists, so the package that exports its class has been imported.
    """
    for plugin in plugins:
        module, _, attrs = (
            plugin.entry_point.value.partition("[")[0].replace(" ", "").partition(":")
        )
        exported: Any = sys.modules.get(module)
        for attr in filter(None, attrs.split(".")):
            exported = getattr(exported, attr, None)
        if exported is type(target) or exported is target:
            return plugin
    return None


def _without_hooks(plugin: Plugin) -> PluginError:
    target = plugin.target
    role = plugin.role
    if isinstance(target, type):
        return PluginError(
            f"{plugin.source} was given the class {target.__name__}, not an instance of it",
            fix=f"write {target.__name__}(...)",
        )
    if isinstance(target, str):
        fix = f"write {camel(target)}(...), or {shell('-p', target)} on the command line"
    else:
        fix = (
            "pass an object with methods under @hookimpl; `eventloop plugins hooks` lists the hooks"
        )
    kind = a(type(target).__name__)
    return PluginError(f"{role}s=[{target!r}] holds {kind}, not a plugin", fix=fix)


def _name_of(target: object) -> str:
    if isinstance(target, ModuleType):
        return target.__name__.rpartition(".")[2].replace("_", "-")
    name: object = facts_of(target).name
    return name if isinstance(name, str) and name else kebab(type(target).__name__)
