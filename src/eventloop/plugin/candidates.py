"""Takes each discovered plugin from package to object; collects problems instead of raising."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eventloop.config.unknown_names import unknown_keys
from eventloop.errors import EventloopError, PluginError, text_of
from eventloop.hook_markers import hookimpl
from eventloop.naming import fold
from eventloop.plugin.configure import configure, dormant_reason, plugin_options
from eventloop.plugin.declared_hooks import HOOKS
from eventloop.plugin.load import Outcome, load
from eventloop.plugin.metadata import discover, shadowed
from eventloop.plugin.mistakes import without_hooks
from eventloop.plugin.name_problems import name_problems
from eventloop.plugin.owners import Assembly, arrange, refused_by_pluggy
from eventloop.plugin.records import Candidate, Found, Plugin
from eventloop.plugin.select import problems_of, select
from eventloop.plugin.validate import takes_part
from eventloop.signals import is_interrupted, named_interrupts

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.config.plugin_flags import Choice
    from eventloop.config.plugin_rules import Rules
    from eventloop.plugin.metadata import Installed


class Candidates:
    """The plugins that a command discovered, selected and loaded, so that each is done once.

    Args:
        configuration: names files to search, in addition to installed packages.
        installed: the result of `installed_entry_points`, if it was called already.

    Attributes:
        found: every plugin.
        unreadable: a problem for each file and distribution that can't be read.
    """

    def __init__(self, configuration: Configuration, installed: Installed | None = None) -> None:
        self.found, self.unreadable = discover(configuration.local, installed)
        self._asked: tuple[Choice, Rules] | None = None
        self._selected: tuple[Candidate, ...] = ()
        self._outcomes: dict[Found, Outcome] = {}

    def selected(self, configuration: Configuration) -> tuple[Candidate, ...]:
        """Selects; again if the choice has changed, as in a resumed run."""
        asked = configuration.choice, configuration.rules
        if self._asked != asked:
            self._asked, self._selected = asked, select(self.found, *asked)
        return self._selected

    def loaded(self, one: Candidate) -> Candidate:
        """Imports an active plugin that hasn't been imported yet; see `load`."""
        return load(one, self._outcomes)


def select_all(
    configuration: Configuration,
    passed: Collection[str] | None = (),
    candidates: Candidates | None = None,
) -> tuple[tuple[Candidate, ...], list[EventloopError]]:
    """Discovers and selects; imports nothing.

    Args:
        passed: names of plugins passed in Python; None if not known yet.
        candidates: already discovered.

    Returns:
        Every discovered plugin, and the problems with the choice.
    """
    candidates = candidates or Candidates(configuration)
    selected = candidates.selected(configuration)
    problems = problems_of(selected, configuration.choice, configuration.rules, passed)
    return selected, [*candidates.unreadable, *problems, *shadowed(selected)]


def load_all(
    configuration: Configuration,
    selected: Sequence[Candidate],
    candidates: Candidates,
    passed: Collection[str] | None = (),
) -> tuple[list[Candidate], list[EventloopError]]:
    """Loads and builds the selected plugins, except those replaced by an object passed in Python.

    Returns:
        The rows and their problems, without those of `select_all`.
    """
    replaced = set(map(fold, passed or ()))
    unusable = name_problems(selected)
    remaining = [one for one in selected if fold(one.found.name) not in replaced]
    with named_interrupts():
        loaded = [  # before one is built
            dataclasses.replace(one, problems=(unusable[one.found],))
            if one.found in unusable
            else candidates.loaded(one)
            for one in remaining
        ]
        rows = [_row(one, configuration) for one in loaded]
    options = {
        row.found.name: _option_names(_judged(row, configuration, candidates)) for row in rows
    }
    unknown = list(unknown_keys(configuration.layers, options, passed=passed))
    for idx, row in enumerate(rows):  # what is wrong with options that were set for its plugin
        if own := [problem for section, problem in unknown if section == fold(row.found.name)]:
            rows[idx] = dataclasses.replace(row, problems=(*row.problems, *own))
    # What is wrong with names, `select_all` has told already.
    problems = [one for row in rows if row.found not in unusable for one in row.problems]
    return rows, list(dict.fromkeys([*problems, *(problem for _, problem in unknown)]))


def unexpected(subject: Found | Plugin, error: BaseException) -> PluginError:
    """Returns the problem with a plugin that raises unexpectedly."""
    problem = PluginError(
        f"{subject.name} can't be looked at: {type(error).__name__}: " + text_of(error),
        subjects=[subject],
        plugin=subject.origin,
        fix="fix it, or " + subject.way_out,
    )
    problem.__cause__ = error
    return problem


def found_subjects(problem: EventloopError) -> Iterator[Found]:
    """Yields a problem's subjects that are discovered plugins."""
    for one in problem.subjects:
        found = one if isinstance(one, Found) else getattr(one, "found", None)
        if found is not None:
            yield found


def _row(one: Candidate, configuration: Configuration) -> Candidate:
    """Builds a plugin that was loaded; an exception becomes a problem of its row."""
    if one.status == "off" or one.problems:
        return one
    try:
        return _built(one, configuration)
    except EventloopError as error:
        return dataclasses.replace(one, problems=(error,))
    except BaseException as error:
        if is_interrupted(error):
            raise
        return dataclasses.replace(one, problems=(unexpected(one.found, error),))


def _judged(row: Candidate, configuration: Configuration, candidates: Candidates) -> object:
    """Returns the object whose options apply to a plugin.

    Options of a plugin that a resumed run began without are also checked if a new run would leave
    it out, too: the command that began the run may set them.
    """
    if row.kind not in ("run", "since", "unsuitable"):
        return row.target
    if not (section := configuration.section(row.found.name)):
        return row.target
    target = candidates.loaded(dataclasses.replace(row, status="active")).target
    is_idle = row.kind == "unsuitable" or dormant_reason(row.found, target, section)
    return target if is_idle else None


def _built(one: Candidate, configuration: Configuration) -> Candidate:
    options = plugin_options(one.target)
    section = configuration.section(one.found.name)
    values = {key: value for key, value in section.items() if key in options}
    reason = dormant_reason(one.found, one.target, values)
    if reason and not configuration.who_insists(one.found):
        return dataclasses.replace(one, status="off", reason=reason, kind="option", fix="")
    plugin = configure(one.found, one.target, values)
    if not takes_part(plugin, HOOKS):
        raise without_hooks(plugin)
    return dataclasses.replace(one, plugin=plugin)


def _option_names(target: object) -> list[str] | None:
    if target is None:
        return None
    try:
        return list(plugin_options(target))
    except Exception:  # noqa: BLE001 - is a problem of its row already
        return None


@dataclass(frozen=True)
class DryAssembly:
    """All plugins, the order in which they would run, and all problems.

    Args:
        rows: one per plugin, in the order of discovery.
        assembly: of the usable plugins.
        problems: every problem once; those of a plugin are in its row, too.
    """

    rows: tuple[Candidate, ...]
    assembly: Assembly
    problems: tuple[EventloopError, ...]

    def row(self, name: str) -> Candidate | None:
        """Returns the plugin with a name; the active one if there are several."""
        named = [row for row in self.rows if fold(row.found.name) == fold(name)]
        return next((row for row in named if row.plugin), named[0] if named else None)


def dry_assemble(
    configuration: Configuration,
    passed: Collection[str] | None = (),
    candidates: Candidates | None = None,
) -> DryAssembly:
    """Loads, builds and orders all plugins, and continues where a run would stop.

    Takes the arguments of `select_all`.
    """
    candidates = candidates or Candidates(configuration)
    selected, problems = select_all(configuration, passed, candidates)
    rows, failures = load_all(configuration, selected, candidates, passed)
    plugins = [row.plugin for row in rows if row.plugin is not None]
    off = [row for row in rows if row.status == "off"]
    installed = tuple(one.found.name for one in selected)
    assembly, misfits = _arranged(plugins, off, configuration.rules, installed)
    problems += [*failures, *misfits]
    with warnings.catch_warnings(action="ignore"):  # the assembly's remarks have them
        problems += refused_by_pluggy(assembly, problems)
    by_subject: dict[Found, list[EventloopError]] = {}
    for problem in problems:
        for subject in found_subjects(problem):
            by_subject.setdefault(subject, []).append(problem)
    remaining = tuple(
        dataclasses.replace(
            row, problems=tuple(dict.fromkeys([*row.problems, *by_subject.get(row.found, ())]))
        )
        for row in rows
    )
    return DryAssembly(remaining, assembly, tuple(dict.fromkeys(problems)))


def _arranged(
    plugins: Sequence[Plugin], off: Sequence[Candidate], rules: Rules, installed: Sequence[str]
) -> tuple[Assembly, list[PluginError]]:
    """Orders plugins; a plugin that can't be inspected is left out and reported as a problem."""
    problems = []
    remaining = []
    for plugin in plugins:
        try:
            arrange([plugin], installed=installed)
        except BaseException as error:  # noqa: BLE001
            problems.append(unexpected(plugin, error))
        else:
            remaining.append(plugin)
    stand_in = Plugin("task", "task", _stand_in(rules))
    assembly, misfits = arrange([stand_in, *remaining], off, rules, installed)
    return assembly, [*problems, *misfits]


def _stand_in(rules: Rules) -> object:
    """Creates a stand-in for the task with the actions that `owners` assigns to the task."""

    def answer(state: object) -> None:
        """Represents the task's implementation, which isn't known yet."""

    actions = [action for action, owner in rules.owners.items() if owner.value == "task"]
    return SimpleNamespace(**{action: hookimpl(answer) for action in actions})
