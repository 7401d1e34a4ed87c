"""Runs all steps: discover, choose, load, build, validate, order; the result is a `Registry`.

Problems are collected on the way. A run raises them; a command can show them.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eventloop.config.unknown_names import unknown_keys
from eventloop.errors import EventloopError, PluginError, text_of
from eventloop.hook_markers import hookimpl
from eventloop.naming import fold
from eventloop.plugin.build import build, dormancy, plugin_options
from eventloop.plugin.choose import choose, problems_of
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.discover import discover, shadowed
from eventloop.plugin.load import imported
from eventloop.plugin.mistakes import without_hooks
from eventloop.plugin.passed import accept
from eventloop.plugin.records import Found, Plugin
from eventloop.plugin.registry import Registry, arrange, refused_by_pluggy
from eventloop.plugin.validate import takes_part
from eventloop.signals import is_interrupted, named_interrupts

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.config.plugin_flags import Choice, Reason
    from eventloop.config.plugin_rules import Rules
    from eventloop.plugin.discover import Installed


class Discovery:
    """The plugins that a command discovered; each plugin is imported at most once.

    Args:
        configuration: names the files to search in addition to installed packages.
        installed: the result of `installed_entry_points`, if it was called already.

    Attributes:
        found: every discovered plugin.
        unreadable: a problem for each file and distribution that can't be read.
    """

    def __init__(self, configuration: Configuration, installed: Installed | None = None) -> None:
        self.found, self.unreadable = discover(configuration.local, installed)
        self._request: tuple[Choice, Rules] | None = None
        self._chosen: tuple[Plugin, ...] = ()
        # The imported object or the error of each plugin.
        self._imports: dict[Found, object] = {}

    def chosen(self, configuration: Configuration) -> tuple[Plugin, ...]:
        """Returns every discovered plugin, chosen or off.

        Decides again if the configuration's choice or rules have changed, as they do when a run is
        resumed.
        """
        request = configuration.choice, configuration.rules
        if self._request != request:
            self._request = request
            self._chosen = choose(self.found, configuration.choice, configuration.rules)
        return self._chosen

    def problems(
        self, configuration: Configuration, passed: Collection[str] | None = ()
    ) -> list[EventloopError]:
        """Returns the problems with the choice, without importing a plugin.

        Args:
            passed: names of plugins passed in Python; None if they aren't known yet.
        """
        chosen = self.chosen(configuration)
        problems = problems_of(chosen, configuration.choice, configuration.rules, passed)
        return [*self.unreadable, *problems, *shadowed(chosen)]

    def loaded(self, plugin: Plugin, configuration: Configuration) -> Plugin:
        """Imports a chosen plugin, and decides whether it waits for options.

        Returns:
            The plugin with the stage "loaded", "dormant" or "failed"; unchanged if it isn't chosen.
        """
        if plugin.stage != "chosen" or plugin.found is None:
            return plugin
        if plugin.found not in self._imports:
            try:
                self._imports[plugin.found] = imported(plugin.found)
            except PluginError as error:
                self._imports[plugin.found] = error
        outcome = self._imports[plugin.found]
        if isinstance(outcome, PluginError):
            return plugin.failed(outcome)
        plugin = dataclasses.replace(plugin, imported=outcome, stage="loaded")
        return _attempt(_woken, plugin, configuration)


def assemble(
    configuration: Configuration,
    discovery: Discovery | None = None,
    *,
    task: Plugin | None = None,
    core: Iterable[Plugin] = (),
    passed: Sequence[Plugin] | None = (),
) -> Registry:
    """Builds the plugins of a run or a command, each once, and orders them.

    Args:
        configuration: of the run.
        discovery: the plugins that the command has discovered and loaded already.
        task: None for a command that shows plugins without having a task.
        core: the core's plugins.
        passed: plugins of the task, of `Trainer` and of flags; see `passed_plugins`. None if they
            aren't known yet.
    """
    discovery = discovery or Discovery(configuration)
    names = None if passed is None else [plugin.name for plugin in passed]
    problems = discovery.problems(configuration, names)
    accepted, refusals = accept(passed or (), configuration)
    records, failures = _built(discovery, configuration, names)
    participants = [task or _stand_in(configuration.rules), *records, *accepted]
    is_shown = any(
        plugin.facts.shows_progress for plugin in participants if plugin.stage == "active"
    )
    participants += [plugin for plugin in core if not (is_shown and plugin.facts.shows_progress)]
    registry = _arranged(participants, configuration.rules)
    problems += [*failures, *refusals, *registry.problems]
    registry = dataclasses.replace(registry, problems=tuple(dict.fromkeys(problems)))
    # Only a run shows the warnings of deprecated hooks; commands print remarks instead.
    is_silent = task is None or bool(problems)
    with warnings.catch_warnings(action="ignore") if is_silent else nullcontext():
        refused = refused_by_pluggy(registry)
    return dataclasses.replace(registry, problems=(*registry.problems, *refused))


def unsuitable_reasons(
    answers: Iterable[tuple[Plugin, str]], who_insists: Callable[[Found], Reason | None]
) -> dict[str, str]:
    """Returns the reasons that plugins returned from `unsuitable`, by folded name.

    Args:
        answers: (plugin, reason) pairs.
        who_insists: returns how the user requested a plugin by name, or None.

    Raises:
        PluginError: a plugin that was requested by name can't be used.
    """
    reasons = {}
    for plugin, reason in answers:
        requested_by = "" if plugin.found is not None else plugin.source
        fix = plugin.way_out
        if plugin.found is not None and (insists := who_insists(plugin.found)):
            requested_by = insists.text
            fix = insists.fix
        if requested_by:
            raise PluginError(
                f"{plugin.name} was asked for, but doesn't suit this task: " + reason,
                subjects=[plugin],
                plugin=plugin.origin,
                by=requested_by,
                fix=fix,
            )
        reasons[fold(plugin.name)] = reason
    return reasons


def unexpected(plugin: Found | Plugin, error: BaseException) -> PluginError:
    """Returns the error for a plugin that raised while the core read it."""
    problem = PluginError(
        f"{plugin.name} can't be inspected: {type(error).__name__}: " + text_of(error),
        subjects=[plugin],
        plugin=plugin.origin,
        fix="fix it, or " + plugin.way_out,
    )
    problem.__cause__ = error
    return problem


def _attempt(
    step: Callable[[Plugin, Configuration], Plugin], plugin: Plugin, configuration: Configuration
) -> Plugin:
    """Takes a plugin to its next stage; after an exception its stage is "failed"."""
    try:
        return step(plugin, configuration)
    except EventloopError as error:
        return plugin.failed(error)
    except BaseException as error:
        if is_interrupted(error):
            raise
        return plugin.failed(unexpected(plugin, error))


def _woken(plugin: Plugin, configuration: Configuration) -> Plugin:
    """Makes a loaded plugin dormant if it waits for options; a run decides this only here."""
    if reason := dormancy(plugin, configuration):
        return dataclasses.replace(plugin, stage="dormant", reason=reason, kind="option", undo="")
    return plugin


def _built(
    discovery: Discovery, configuration: Configuration, passed: Collection[str] | None
) -> tuple[list[Plugin], list[EventloopError]]:
    """Loads and builds the chosen plugins, except those replaced by an object passed in Python.

    Returns:
        The plugins, and the problems that `Discovery.problems` doesn't report.
    """
    replaced = set(map(fold, passed or ()))
    chosen = discovery.chosen(configuration)
    remaining = [plugin for plugin in chosen if fold(plugin.name) not in replaced]
    with named_interrupts():
        # All plugins are imported before the first is built: a constructor may start threads or
        # change global state, which the import of another plugin shouldn't see.
        loaded = [discovery.loaded(plugin, configuration) for plugin in remaining]
        records = [
            _attempt(_build, plugin, configuration) if plugin.stage == "loaded" else plugin
            for plugin in loaded
        ]
    failures = [plugin.failure for plugin in records if plugin.failure is not None]
    options = {plugin.name: _option_names(plugin, configuration, discovery) for plugin in loaded}
    for section, problem in unknown_keys(configuration.layers, options, passed=passed):
        of_section = [plugin for plugin in records if fold(plugin.name) == section]
        problem.subjects = (*problem.subjects, *of_section)
        failures.append(problem)
    return records, failures


def _build(plugin: Plugin, configuration: Configuration) -> Plugin:
    plugin = build(plugin, configuration)
    if not takes_part(plugin, HOOKS):
        raise without_hooks(plugin)
    return plugin


def _option_names(
    plugin: Plugin, configuration: Configuration, discovery: Discovery
) -> list[str] | None:
    """Returns the names of a plugin's options; None if it is off or can't be read.

    A resumed run may have begun without the plugin. The options are still returned if it didn't
    suit the task, or if a new run would leave it dormant: the command that began the run may set
    them.
    """
    target = plugin.imported
    if plugin.kind in ("run", "since", "unsuitable") and configuration.section(plugin.name):
        in_new_run = discovery.loaded(dataclasses.replace(plugin, stage="chosen"), configuration)
        if plugin.kind == "unsuitable" or in_new_run.stage == "dormant":
            target = in_new_run.imported
    if target is None:
        return None
    try:
        return list(plugin_options(target))
    except Exception:  # noqa: BLE001 - reported as the plugin's failure already
        return None


def _arranged(records: Sequence[Plugin], rules: Rules) -> Registry:
    """Validates and orders plugins; a plugin that can't be inspected gets the stage "failed"."""
    try:
        return arrange(records, rules)
    except BaseException as error:
        if is_interrupted(error):
            raise
    # Arranging each plugin alone shows which plugin raised.
    remaining = [_inspected(plugin) for plugin in records]
    failures = [plugin.failure for plugin in remaining if plugin.failure is not None]
    registry = arrange(remaining, rules)
    return dataclasses.replace(registry, problems=(*failures, *registry.problems))


def _inspected(plugin: Plugin) -> Plugin:
    if plugin.stage != "active":
        return plugin
    try:
        arrange([plugin])
    except BaseException as error:
        if is_interrupted(error):
            raise
        return plugin.failed(unexpected(plugin, error))
    return plugin


def _stand_in(rules: Rules) -> Plugin:
    """Creates a stand-in for the task, with the actions that `owners` assigns to the task.

    Commands that list plugins have no task; without it, `owners` would seem to name an
    implementation that doesn't exist.
    """

    def answer(state: object) -> None:
        """Stands in for the task's implementation."""

    actions = [action for action, owner in rules.owners.items() if owner.value == "task"]
    return Plugin(
        "task", "task", SimpleNamespace(**{action: hookimpl(answer) for action in actions})
    )
