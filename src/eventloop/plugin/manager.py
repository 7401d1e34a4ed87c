"""The manager: runs the seven steps in a row, from what is installed to plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import pluggy

from eventloop.actions import Actions
from eventloop.configuration import Configuration
from eventloop.errors import PluginError, a, raise_all
from eventloop.events import Events
from eventloop.hooks import PROJECT
from eventloop.plugin.assembly import HOOKS, Assembly, Wishes, arrange
from eventloop.plugin.configure import configure, dormant_reason, plugin_options
from eventloop.plugin.discover import discover
from eventloop.plugin.load import load
from eventloop.plugin.records import Found, Plugin, Selected, fold
from eventloop.plugin.select import select
from eventloop.plugin.shadow import shadowed
from eventloop.plugin.validate import takes_part
from eventloop.state import State


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
    choice, rules = configuration.choice, configuration.rules
    selected = select(discover(files=choice.files), choice, rules)
    wanted = [one for one in selected if fold(one.found.name) not in taken]
    loaded, failures = load(wanted)
    problems = [*failures, *shadowed(wanted)]
    plugins = []
    off = [one for one in wanted if one.status == "off"]
    options: dict[str, Collection[str] | None] = {one.found.name: None for one in selected}
    options |= {one.found.name: plugin_options(one.target) for one in loaded}
    configuration.check(options)
    for one in loaded:
        try:
            values = configuration.section(one.found.name)
            reason = dormant_reason(one.found, one.target, values)
            if reason and not configuration.insists_on(one.found):
                off.append(Selected(one.found, "off", reason))
            else:
                plugins.append(configure(one.found, one.target, values))
        except PluginError as error:
            problems.append(error)
    return plugins, off, problems


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
    rules = configuration.rules
    found = discover(files=configuration.choice.files)
    given = [
        *handed_over(algorithms, "algorithm", found),
        *handed_over(callbacks, "callback", found),
    ]
    raise_all([_no_plugin(one) for one in given if not takes_part(one, HOOKS)])
    plugins, off, problems = installed(configuration, [one.name for one in given])
    everybody = [task, *plugins, *given, *core]
    known = (*(one.name for one in found), *(one.name for one in given))
    owners = {action: value.value for action, value in rules.owners.items()}
    assembly, misfits = arrange(everybody, off, Wishes(rules.edges, owners, known))
    problems += [*rules.object_problems(given), *misfits]
    raise_all([*problems, *rules.order_problems(assembly.hooks, known)])
    _register(assembly)
    return assembly


def without(assembly: Assembly, reasons: Mapping[str, str]) -> Assembly:
    """Gives the assembly without some installed plugins, which are off from now on.

    Args:
        reasons: why, by folded name.

    Raises:
        PluginError: another plugin can't do without one of them.
    """
    dropped = [one for one in assembly.plugins if fold(one.name) in reasons]
    kept = [one for one in assembly.plugins if one not in dropped]
    off = [
        Selected(one.found, "off", reasons[fold(one.name)])
        for one in dropped
        if one.found is not None
    ]
    smaller, problems = arrange(kept, [*assembly.off, *off], assembly.wishes)
    raise_all(problems)
    return smaller


def unsuitable_reasons(
    asked: Iterable[Plugin], state: State, insists_on: Callable[[Found], bool]
) -> dict[str, str]:
    """Asks plugins whether they suit the first batch, which is `state.batch`.

    Returns:
        Why not, by folded name.

    Raises:
        PluginError: one that somebody asked for doesn't.
    """
    reasons = {}
    for plugin in asked:
        target: Any = plugin.target
        reason = target.unsuitable(state)
        if reason and (plugin.found is None or insists_on(plugin.found)):
            raise PluginError(
                f"{plugin.name} was asked for, but doesn't suit this task: {reason}",
                plugin=plugin.origin,
                fix="leave it out",
            )
        if reason:
            reasons[fold(plugin.name)] = reason
    return reasons


def _register(assembly: Assembly) -> None:
    """Lets pluggy check every plugin against every hook, as the last word on what fits."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Events)
    manager.add_hookspecs(Actions)
    for plugin in assembly.plugins:
        own_hooks = getattr(plugin.target, "hookspecs", None)
        if own_hooks is not None:
            manager.add_hookspecs(own_hooks)
    for plugin in assembly.plugins:
        try:
            manager.register(plugin.target, None if plugin.role == "core" else plugin.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(
                f"pluggy refuses {plugin.name!r}: {error}",
                plugin=plugin.origin,
                fix=plugin.fix("mend it"),
            ) from error


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


def _no_plugin(plugin: Plugin) -> PluginError:
    target, role = plugin.target, plugin.role
    kind = a(type(target).__name__)
    if isinstance(target, str):
        camel = "".join(word.capitalize() for word in fold(target).split("_"))
        fix = f"write {camel}(...), or `-p {target}` on the command line"
    else:
        fix = (
            "hand over an object with methods under @hookimpl; `eventloop plugins hooks` lists them"
        )
    return PluginError(f"{role}s=[{target!r}] holds {kind}, not a plugin", fix=fix)


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
