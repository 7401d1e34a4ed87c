"""The manager: runs all steps, from installed packages to an assembly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from importlib_metadata import EntryPoint

from eventloop.config.plugin_flags import Reason
from eventloop.errors import PluginError, a, raise_all
from eventloop.fixes import shell
from eventloop.naming import camel, fold, kebab
from eventloop.plugin.candidates import Candidates, load_all, select_all
from eventloop.plugin.configure import stored_options
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.owners import Assembly, arrange, refused_by_pluggy
from eventloop.plugin.plugin_attributes import facts_of
from eventloop.plugin.records import GROUP_OF, Candidate, FlagPlugin, Found, Plugin
from eventloop.plugin.select import is_switched_off, object_problems
from eventloop.plugin.validate import takes_part

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration


def handed_over(
    objects: Sequence[object],
    role: Literal["algorithm", "callback"],
    found: Sequence[Found],
    by: Literal["Task", "Trainer"] = "Trainer",
) -> list[Plugin]:
    """Makes plugins of the objects passed to `Trainer` or provided by the task.

    A plugin's name is that of its class's entry point, or its attribute `name`, or its class's
    name in kebab-case.
    """
    plugins = []
    for passed in objects:
        plugin = Plugin("", role, passed, source=f"{by}({role}s=...)", by=by)
        if isinstance(passed, FlagPlugin):
            plugin = Plugin("", role, passed.target, source=passed.flag, by="flag")
        known = _found_as(plugin.target, found)
        name, distribution, version = _name_of(plugin.target), "", ""
        if known is not None:
            name, distribution, version = known.name, known.distribution, known.version
        options = stored_options(plugin.target)
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
    """Assembles the plugins of a run.

    Args:
        candidates: already discovered and loaded by the command.
        algorithms, callbacks: passed to `Trainer`.
        of_task: the algorithms and callbacks of the task.

    Raises:
        EventloopError: all problems of the plugins and of their choice, in one message.
    """
    rules = configuration.rules
    candidates = candidates or Candidates(configuration)
    found = candidates.found
    instances = [
        *handed_over(of_task[0], "algorithm", found, "Task"),
        *handed_over(of_task[1], "callback", found, "Task"),
        *handed_over(algorithms, "algorithm", found),
        *handed_over(callbacks, "callback", found),
    ]
    instances.sort(key=lambda one: (one.role, fold(one.name)))
    names = [one.name for one in instances]
    selected, problems = select_all(configuration, names, candidates)
    off_names = [one.name for one in instances if is_switched_off(one.name, configuration.choice)]
    off = [_switched_off(one) for one in instances if one.by == "Task" and one.name in off_names]
    instances = [one for one in instances if one.by != "Task" or one.name not in off_names]
    plugins = []
    for one in instances:
        if isinstance(one.target, type) or not takes_part(one, HOOKS):
            problems.append(_without_hooks(one))
        else:
            plugins.append(one)
    rows, failures = load_all(configuration, selected, candidates, names)
    off += [row for row in rows if row.status == "off"]
    participants = [task, *(row.plugin for row in rows if row.plugin), *plugins]
    is_shown = any(one.facts.shows_progress for one in participants)
    participants += [one for one in core if not (is_shown and one.facts.shows_progress)]
    known = (*(one.name for one in found), *names)
    assembly, misfits = arrange(participants, off, rules, known)
    raise_all([*problems, *failures, *object_problems(instances, rules), *misfits])
    raise_all(refused_by_pluggy(assembly))
    return assembly


def without(assembly: Assembly, reasons: Mapping[str, str]) -> Assembly:
    """Returns the assembly without some installed plugins, which are then off.

    Args:
        reasons: why, by folded name.

    Raises:
        PluginError: another plugin requires one of them.
    """
    dropped = [one for one in assembly.plugins if fold(one.name) in reasons]
    remaining = [one for one in assembly.plugins if one not in dropped]
    off = [
        Candidate(one.found, "off", reasons[fold(one.name)], "task")
        for one in dropped
        if one.found is not None
    ]
    smaller, problems = arrange(
        remaining, [*assembly.off, *off], assembly.rules, assembly.installed
    )
    raise_all(problems)
    return smaller


def unsuitable_reasons(
    answers: Iterable[tuple[Plugin, str]], who_insists: Callable[[Found], Reason | None]
) -> dict[str, str]:
    """Returns the answers of `unsuitable` by folded name.

    Raises:
        PluginError: a plugin that was requested by name can't be used.
    """
    reasons = {}
    for plugin, reason in answers:
        as_passed = Reason(plugin.source, fix=plugin.way_out)
        asked_by = as_passed if plugin.found is None else who_insists(plugin.found)
        if asked_by:
            raise PluginError(
                f"{plugin.name} was asked for, but doesn't suit this task: " + reason,
                subjects=[plugin],
                plugin=plugin.origin,
                by=asked_by.text,
                fix=asked_by.fix,
            )
        reasons[fold(plugin.name)] = reason
    return reasons


def _switched_off(plugin: Plugin) -> Candidate:
    """Returns a task's plugin that `-p no:NAME` disabled, as a candidate that is off."""
    point = EntryPoint(plugin.name, plugin.source, GROUP_OF[plugin.role])
    found = Found(plugin.name, plugin.role, point, plugin.distribution, plugin.version)
    return Candidate(found, "off", f"-p no:{plugin.name}", "flag")


def _found_as(target: object, found: Sequence[Found]) -> Found | None:
    """Finds the entry point of an object's class, under any exported name.

    Imports nothing: the package that exports an existing class has been imported.
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
        fix = f"write {camel(target)}(...), or {shell('-p', target)} on the command line"
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
