"""The manager: runs the seven steps in a row, from what is installed to plans."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import pluggy

from eventloop.actions import Actions
from eventloop.configuration import Configuration
from eventloop.errors import PluginError, raise_all
from eventloop.events import Events
from eventloop.hooks import PROJECT, Hook, declared_hooks
from eventloop.plugin.configure import configure, plugin_options
from eventloop.plugin.discover import discover
from eventloop.plugin.load import load
from eventloop.plugin.order import Implementation, order, order_of_owners
from eventloop.plugin.records import Found, Plugin, Selected, fold
from eventloop.plugin.select import RESERVED, select
from eventloop.plugin.validate import implementations

HOOKS: dict[str, Hook] = declared_hooks([Events, Actions])


@dataclass(frozen=True)
class Assembly:
    """The plugins of a run, and what they implement.

    Args:
        plugins: those that take part, in order, with the task and the core.
        off: those that are installed and don't.
        implementations: by hook, in order; every hook is there.
    """

    plugins: tuple[Plugin, ...]
    off: tuple[Selected, ...]
    implementations: Mapping[str, tuple[Implementation, ...]]

    def owner(self, action: str) -> Plugin:
        """Gives the plugin that answers an action.

        Raises:
            PluginError: nobody does.
        """
        plain = [one for one in self.implementations[action] if not one.wrapper]
        ordered = order_of_owners(plain)
        if not ordered:
            raise PluginError(
                f"nobody answers the action {action}",
                fix=f"implement {action} in the task or in an algorithm",
            )
        return next((one for one in ordered if not one.conditional), ordered[-1]).plugin


def installed(
    configuration: Configuration, replaced: Iterable[str] = ()
) -> tuple[list[Plugin], list[Selected], list[PluginError]]:
    """Discovers, selects, loads and configures the installed plugins.

    Args:
        replaced: names whose place an object takes that was handed over.

    Returns:
        The plugins, those that are off, and the problems with the others.
    """
    taken = set(map(fold, replaced))
    selected = select(discover(), configuration.choice)
    wanted = [one for one in selected if fold(one.found.name) not in taken]
    loaded, failures = load(wanted)
    problems = list(failures)
    plugins = []
    options: dict[str, Collection[str] | None] = {one.found.name: None for one in selected}
    options |= {one.found.name: plugin_options(one.target) for one in loaded}
    configuration.check(options)
    for one in loaded:
        try:
            values = configuration.section(one.found.name)
            plugins.append(configure(one.found, one.target, values))
        except PluginError as error:
            problems.append(error)
    return plugins, [one for one in wanted if one.status == "off"], problems


def handed_over(
    objects: Sequence[object], role: Literal["algorithm", "callback"], found: Sequence[Found]
) -> list[Plugin]:
    """Makes plugins of the objects that were passed to `Trainer` or that the task brings.

    Each has the name of the entry point that its class is, else its `name`, else its class's in
    kebab-case.

    Raises:
        PluginError: a class was passed where an instance belongs.
    """
    plugins = []
    source = f"Trainer({role}s=...)"
    for target in objects:
        if isinstance(target, type):
            raise PluginError(
                f"{source} was given the class {target.__name__}, not an instance of it",
                fix=f"write {target.__name__}(...)",
            )
        known = _found_as(target, found)
        if known is not None:
            plugins.append(
                Plugin(known.name, role, target, known.distribution, known.version, source)
            )
        else:
            plugins.append(Plugin(_name_of(target), role, target, source=source))
    return plugins


def assemble(
    configuration: Configuration,
    *,
    task: Plugin,
    core: Sequence[Plugin],
    algorithms: Sequence[object],
    callbacks: Sequence[object],
) -> Assembly:
    """Puts together the plugins of a run.

    Raises:
        PluginError: the problems of all plugins in one message.
    """
    found = discover()
    given = [
        *handed_over(algorithms, "algorithm", found),
        *handed_over(callbacks, "callback", found),
    ]
    plugins, off, problems = installed(configuration, [one.name for one in given])
    plugins = [task, *plugins, *given, *core]
    problems += _name_problems(plugins)

    by_hook: dict[str, list[Implementation]] = {name: [] for name in HOOKS}
    for plugin in plugins:
        implemented, misfits = implementations(plugin, HOOKS)
        problems += misfits
        for one in implemented:
            by_hook[one.hook.name].append(one)
    problems += _several_owners(by_hook)
    raise_all(problems)

    _register(plugins)
    place = {"task": 0, "algorithm": 1, "callback": 2, "core": 3}
    plugins.sort(key=lambda one: (place[one.role], fold(one.name)))
    ordered = {name: order(found_here) for name, found_here in by_hook.items()}
    return Assembly(tuple(plugins), tuple(off), ordered)


def _register(plugins: Sequence[Plugin]) -> None:
    """Lets pluggy check every plugin against every hook, as the last word on what fits."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Events)
    manager.add_hookspecs(Actions)
    for plugin in plugins:
        try:
            manager.register(plugin.target, None if plugin.role == "core" else plugin.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(
                f"pluggy refuses {plugin.name!r}: {error}",
                plugin=plugin.origin,
                fix=plugin.fix("mend it"),
            ) from error


def _name_problems(plugins: Sequence[Plugin]) -> list[PluginError]:
    by_name: dict[str, Plugin] = {}
    problems = []
    for plugin in plugins:
        if plugin.role == "core":
            continue
        if fold(plugin.name) in RESERVED and plugin.role != "task":
            problems.append(
                PluginError(
                    f"a plugin can't be named {plugin.name!r}: {' and '.join(RESERVED)} stand for "
                    "something else",
                    plugin=plugin.origin,
                    fix="give it another `name`",
                )
            )
            continue
        other = by_name.setdefault(fold(plugin.name), plugin)
        if other is not plugin:
            problems.append(
                PluginError(
                    f"two plugins are named {plugin.name!r}: {other.origin} and {plugin.origin}",
                    fix="give one of them another `name`, or leave it out",
                )
            )
    return problems


def _several_owners(by_hook: Mapping[str, Sequence[Implementation]]) -> list[PluginError]:
    problems = []
    for name, found_here in by_hook.items():
        owners = [
            one.plugin
            for one in order(found_here)
            if one.hook.kind == "action" and one.plugin.role == "algorithm"
            and not one.wrapper and not one.conditional
        ]  # fmt: skip
        if len(owners) > 1:
            problems.append(
                PluginError(
                    f"{len(owners)} plugins claim the action {name}",
                    plugins=", ".join(one.origin for one in owners),
                    fix=f"keep one; to do without {owners[-1].name}, {owners[-1].way_out}",
                )
            )
    return problems


def _found_as(target: object, found: Sequence[Found]) -> Found | None:
    """Finds the entry point that names an object's class, under whatever name it exports it.

    Imports nothing: where a class exists, so does the package that it is exported from.
    """
    for one in found:
        module, _, attrs = one.entry_point.value.partition("[")[0].replace(" ", "").partition(":")
        named: Any = sys.modules.get(module)
        for attr in filter(None, attrs.split(".")):
            named = getattr(named, attr, None)
        if named is type(target) or named is target:
            return one
    return None


def _name_of(target: object) -> str:
    if isinstance(target, ModuleType):
        return target.__name__.rpartition(".")[2].replace("_", "-")
    name: Any = getattr(target, "name", None)
    if isinstance(name, str) and name:
        return name
    kind = type(target).__name__
    return "".join(
        f"-{char.lower()}"
        if char.isupper() and idx and not kind[idx - 1].isupper()
        else char.lower()
        for idx, char in enumerate(kind)
    )
