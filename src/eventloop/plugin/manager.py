"""The manager: runs the seven steps in a row, from what is installed to plans."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from importlib_metadata import EntryPoint

from eventloop.config.choice import Reason
from eventloop.errors import PluginError, a, raise_all
from eventloop.naming import fold, kebab
from eventloop.plugin.assembly import Assembly, OrderPreferences, arrange, refused_by_pluggy
from eventloop.plugin.candidates import Candidates, load_all, select_all
from eventloop.plugin.configure import options_kept
from eventloop.plugin.declared import HOOKS
from eventloop.plugin.facts import facts_of
from eventloop.plugin.records import GROUPS, FlagPlugin, Found, Plugin, Selected
from eventloop.plugin.validate import takes_part
from eventloop.text import shell

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.state import State


def handed_over(
    objects: Sequence[object],
    role: Literal["algorithm", "callback"],
    found: Sequence[Found],
    by: Literal["Task", "Trainer"] = "Trainer",
) -> list[Plugin]:
    """Makes plugins of the objects that were passed to `Trainer` or that the task brings.

    Each has the name of the entry point that its class is, else its `name`, else its class's in
    kebab-case.
    """
    plugins = []
    for given in objects:
        plugin = Plugin("", role, given, source=f"{by}({role}s=...)", by=by)
        if isinstance(given, FlagPlugin):
            plugin = Plugin("", role, given.target, source=given.flag, by="flag")
        known = _found_as(plugin.target, found)
        name, distribution, version = _name_of(plugin.target), "", ""
        if known is not None:
            name, distribution, version = known.name, known.distribution, known.version
        options = options_kept(plugin.target)
        plugins.append(
            replace(plugin, name=name, distribution=distribution, version=version, options=options)
        )
    return plugins


def assemble(
    configuration: Configuration,
    *,
    candidates: Candidates | None = None,
    task: Plugin,
    core: Sequence[Plugin],
    algorithms: Sequence[object],
    callbacks: Sequence[object],
    of_task: tuple[Sequence[object], Sequence[object]] = ((), ()),
) -> Assembly:
    """Puts together the plugins of a run.

    Args:
        candidates: what the command found and loaded already.
        algorithms, callbacks: handed over to `Trainer`.
        of_task: the algorithms and the callbacks that the task brings.

    Raises:
        EventloopError: the problems of all plugins, and of the choice of them, in one message.
    """
    rules = configuration.rules
    candidates = candidates or Candidates(configuration)
    found = candidates.found
    given = [
        *handed_over(of_task[0], "algorithm", found, "Task"),
        *handed_over(of_task[1], "callback", found, "Task"),
        *handed_over(algorithms, "algorithm", found),
        *handed_over(callbacks, "callback", found),
    ]
    given.sort(key=lambda one: (one.role, fold(one.name)))
    names = [one.name for one in given]
    selected, problems = select_all(configuration, names, candidates)
    off_names = [one.name for one in given if configuration.choice.switches_off(one.name)]
    off = [_switched_off(one) for one in given if one.by == "Task" and one.name in off_names]
    given = [one for one in given if one.by != "Task" or one.name not in off_names]
    plugins = []
    for one in given:
        if isinstance(one.target, type) or not takes_part(one, HOOKS):
            problems.append(_without_hooks(one))
        else:
            plugins.append(one)
    rows, failures = load_all(configuration, selected, candidates, names)
    off += [row.selected for row in rows if row.selected.status == "off"]
    everybody = [task, *(row.plugin for row in rows if row.plugin), *plugins]
    is_shown = any(one.facts.shows_progress for one in everybody)
    everybody += [one for one in core if not (is_shown and one.facts.shows_progress)]
    known = (*(one.name for one in found), *names)
    owners = {action: value.value for action, value in rules.owners.items()}
    assembly, misfits = arrange(everybody, off, OrderPreferences(rules.edges, owners, known))
    problems += [*failures, *rules.object_problems(given), *misfits]
    raise_all([*problems, *rules.order_problems(assembly.hooks, known, assembly.idle)])
    raise_all(refused_by_pluggy(assembly))
    return assembly


def without(assembly: Assembly, reasons: Mapping[str, str]) -> Assembly:
    """Returns the assembly without some installed plugins, which are off from now on.

    Args:
        reasons: why, by folded name.

    Raises:
        PluginError: another plugin can't do without one of them.
    """
    dropped = [one for one in assembly.plugins if fold(one.name) in reasons]
    kept = [one for one in assembly.plugins if one not in dropped]
    off = [
        Selected(one.found, "off", reasons[fold(one.name)], "task")
        for one in dropped
        if one.found is not None
    ]
    smaller, problems = arrange(kept, [*assembly.off, *off], assembly.wishes)
    raise_all(problems)
    return smaller


def unsuitable_reasons(
    asked: Iterable[Plugin], state: State, who_insists: Callable[[Found], Reason | None]
) -> dict[str, str]:
    """Asks plugins whether they suit the first batch, which is `state.batch`.

    Returns:
        Why not, by folded name.

    Raises:
        PluginError: one that was asked for by name doesn't.
    """
    reasons = {}
    for plugin in asked:
        reason = plugin.facts.unsuitable and plugin.facts.unsuitable(state)
        handed_over = Reason(plugin.source, fix=plugin.way_out)
        asked_by = handed_over if plugin.found is None else who_insists(plugin.found)
        if reason and asked_by:
            raise PluginError(
                f"{plugin.name} was asked for, but doesn't suit this task: {reason}",
                subjects=[plugin],
                plugin=plugin.origin,
                by=asked_by.text,
                fix=asked_by.fix,
            )
        if reason:
            reasons[fold(plugin.name)] = reason
    return reasons


def _switched_off(plugin: Plugin) -> Selected:
    """Returns what a task brings, and a flag switches off, as those are told of that are installed."""
    group = next(group for group, role in GROUPS.items() if role == plugin.role)
    point = EntryPoint(plugin.name, plugin.source, group)
    found = Found(plugin.name, plugin.role, point, plugin.distribution, plugin.version)
    return Selected(found, "off", f"-p no:{plugin.name}", "flag")


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


def _without_hooks(plugin: Plugin) -> PluginError:
    target, role = plugin.target, plugin.role
    if isinstance(target, type):
        return PluginError(
            f"{plugin.source} was given the class {target.__name__}, not an instance of it",
            fix=f"write {target.__name__}(...)",
        )
    if isinstance(target, str):
        camel = "".join(word.capitalize() for word in fold(target).split("_"))
        fix = f"write {camel}(...), or {shell('-p', target)} on the command line"
    else:
        fix = (
            "hand over an object with methods under @hookimpl; `eventloop plugins hooks` lists them"
        )
    kind = a(type(target).__name__)
    return PluginError(f"{role}s=[{target!r}] holds {kind}, not a plugin", fix=fix)


def _name_of(target: object) -> str:
    if isinstance(target, ModuleType):
        return target.__name__.rpartition(".")[2].replace("_", "-")
    name: object = facts_of(target).name
    return name if isinstance(name, str) and name else kebab(type(target).__name__)
