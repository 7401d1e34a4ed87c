"""Each plugin that was found, taken from package to object; problems are kept, not raised."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eventloop.errors import EventloopError, PluginError, text_of
from eventloop.hooks import Hook, hookimpl
from eventloop.naming import fold
from eventloop.plugin.assembly import Assembly, OrderPreferences, arrange, refused_by_pluggy
from eventloop.plugin.configure import configure, dormant_reason, plugin_options
from eventloop.plugin.declared import HOOKS
from eventloop.plugin.load import load
from eventloop.plugin.metadata import discover_all, shadowed
from eventloop.plugin.mistakes import without_hooks
from eventloop.plugin.records import Candidate, Found, Plugin, Selected
from eventloop.plugin.select import name_problems, problems_of, select
from eventloop.plugin.validate import takes_part
from eventloop.signals import Interrupted, told_from_a_key
from eventloop.text import switch_off

if TYPE_CHECKING:
    from eventloop.config.choice import Choice
    from eventloop.config.configuration import Configuration
    from eventloop.config.plugin_rules import Rules
    from eventloop.plugin.metadata import Installed


class Candidates:
    """What a command discovered, selected and loaded, handed on so that each is done once.

    Args:
        configuration: says in which files to look, beside what is installed.
        installed: what `installed_entry_points` returned, where it was asked already.

    Attributes:
        found: every plugin.
        unreadable: a problem for each file and distribution that can't be read.
    """

    def __init__(self, configuration: Configuration, installed: Installed | None = None) -> None:
        self.found, self.unreadable = discover_all(configuration.local, installed)
        self._asked: tuple[Choice, Rules] | None = None
        self._selected: tuple[Selected, ...] = ()
        self._outcomes: dict[Found, Candidate] = {}

    def selected(self, configuration: Configuration) -> tuple[Selected, ...]:
        """Selects; again where the choice differs, as that of a resumed run does."""
        asked = configuration.choice, configuration.rules
        if self._asked != asked:
            self._asked, self._selected = asked, select(self.found, *asked)
        return self._selected

    def loaded(self, selected: Iterable[Selected]) -> tuple[list[Candidate], list[EventloopError]]:
        """Imports the active plugins that weren't imported yet; see `load`."""
        return load(selected, self._outcomes)


def select_all(
    configuration: Configuration,
    given: Collection[str] | None = (),
    candidates: Candidates | None = None,
) -> tuple[tuple[Selected, ...], list[EventloopError]]:
    """Discovers and selects; imports nothing.

    Args:
        given: names of what is handed over in Python; None where that isn't known yet.
        candidates: what was discovered already.

    Returns:
        Every plugin that was found, and what is wrong with the choice.
    """
    candidates = candidates or Candidates(configuration)
    selected = candidates.selected(configuration)
    problems = problems_of(selected, configuration.choice, configuration.rules, given)
    return selected, [*candidates.unreadable, *problems, *shadowed(selected)]


def load_all(
    configuration: Configuration,
    selected: Sequence[Selected],
    candidates: Candidates,
    given: Collection[str] | None = (),
) -> tuple[list[Candidate], list[EventloopError]]:
    """Loads and builds what was selected; one whose place an object takes is left out.

    Returns:
        The rows, and all that is wrong with them, but for what `select_all` tells.
    """
    replaced = set(map(fold, given or ()))
    unusable = name_problems(selected)
    kept = [one for one in selected if fold(one.found.name) not in replaced]
    candidates.loaded(one for one in kept if one.found not in unusable)
    rows = [
        Candidate(one, problems=(unusable[one.found],))
        if one.found in unusable
        else _row(one, configuration, candidates)
        for one in kept
    ]
    options = {
        row.found.name: _option_names(_judged(row, configuration, candidates)) for row in rows
    }
    unknown = list(configuration.problems(options, given=given))
    for idx, row in enumerate(rows):  # what is wrong with options that were set for its plugin
        own = [problem for section, problem in unknown if section == fold(row.found.name)]
        rows[idx] = dataclasses.replace(row, problems=(*row.problems, *own))
    # What is wrong with names, `select_all` has told already.
    problems = [one for row in rows if row.found not in unusable for one in row.problems]
    return rows, list(dict.fromkeys([*problems, *(problem for _, problem in unknown)]))


def unexpected(subject: Found | Plugin, error: BaseException) -> PluginError:
    """Returns the problem with a plugin that raises where no plugin should."""
    problem = PluginError(
        f"{subject.name} can't be looked at: {type(error).__name__}: {text_of(error)}",
        subjects=[subject],
        plugin=subject.origin,
        fix=f"fix it, or switch it off with {switch_off(subject.name)}",
    )
    problem.__cause__ = error
    return problem


def found_subjects(problem: EventloopError) -> Iterator[Found]:
    """Yields those of a problem's subjects that were found as installed plugins."""
    for one in problem.subjects:
        found = one if isinstance(one, Found) else getattr(one, "found", None)
        if found is not None:
            yield found


def _row(one: Selected, configuration: Configuration, candidates: Candidates) -> Candidate:
    """Loads and builds one plugin; what it raises is a problem of its row."""
    loaded, failures = candidates.loaded([one])
    if not loaded:
        return Candidate(one, problems=tuple(failures))
    try:
        with told_from_a_key():
            return _built(one, loaded[0].target, configuration)
    except EventloopError as error:
        return Candidate(one, loaded[0].target, problems=(error,))
    except Interrupted:
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin may do anything when it is looked at
        return Candidate(one, loaded[0].target, problems=(unexpected(one.found, error),))


def _judged(row: Candidate, configuration: Configuration, candidates: Candidates) -> object:
    """Returns what has the options of a plugin.

    One that a run in progress began without has them, too, where it would still take no part if the
    run began now: the command that began it may set them.
    """
    if row.selected.kind not in ("run", "unsuitable"):
        return row.target
    if not (section := configuration.section(row.found.name)):
        return row.target
    loaded, _ = candidates.loaded([dataclasses.replace(row.selected, status="active")])
    target = loaded[0].target if loaded else None
    is_idle = row.selected.kind == "unsuitable" or dormant_reason(row.found, target, section)
    return target if is_idle else None


def _built(one: Selected, target: object, configuration: Configuration) -> Candidate:
    options = plugin_options(target)
    section = configuration.section(one.found.name)
    values = {key: value for key, value in section.items() if key in options}
    reason = dormant_reason(one.found, target, values)
    if reason and not configuration.insists_on(one.found):
        return Candidate(Selected(one.found, "off", reason, "option"), target)
    plugin = configure(one.found, target, values)
    if not takes_part(plugin, HOOKS):
        raise without_hooks(plugin)
    return Candidate(one, target, dataclasses.replace(plugin, found=one.found))


def _option_names(target: object) -> list[str] | None:
    if target is None:
        return None
    try:
        return list(plugin_options(target))
    except Exception:  # noqa: BLE001 - is a problem of its row already
        return None


@dataclass(frozen=True)
class DryAssembly:
    """All plugins, in what order they would take part, and everything that is wrong.

    Args:
        rows: a plugin each, in the order of discovery.
        assembly: of those that can take part.
        problems: every problem once; those of a plugin stand in its row too.
    """

    rows: tuple[Candidate, ...]
    assembly: Assembly
    problems: tuple[EventloopError, ...]

    def row(self, name: str) -> Candidate | None:
        """Returns the plugin of that name; the one that takes part, where there are several."""
        named = [row for row in self.rows if fold(row.found.name) == fold(name)]
        return next((row for row in named if row.plugin), named[0] if named else None)


def dry_assemble(
    configuration: Configuration,
    given: Collection[str] | None = (),
    candidates: Candidates | None = None,
) -> DryAssembly:
    """Loads, builds and orders everything that is installed, and goes on where a run would stop.

    Its arguments are those of `select_all`.
    """
    rules = configuration.rules
    candidates = candidates or Candidates(configuration)
    selected, problems = select_all(configuration, given, candidates)
    rows, failures = load_all(configuration, selected, candidates, given)
    plugins = [row.plugin for row in rows if row.plugin is not None]
    off = [row.selected for row in rows if row.selected.status == "off"]
    owners = {action: str(value.value) for action, value in rules.owners.items()}
    installed = tuple(one.found.name for one in selected)
    assembly, misfits = _arranged(plugins, off, OrderPreferences(rules.edges, owners, installed))
    problems += [
        *failures,
        *misfits,
        *rules.order_problems(assembly.hooks, installed, assembly.idle),
    ]
    with warnings.catch_warnings(action="ignore"):  # the assembly's remarks have them
        problems += refused_by_pluggy(assembly, problems)
    by_subject: dict[Found, list[EventloopError]] = {}
    for problem in problems:
        for subject in found_subjects(problem):
            by_subject.setdefault(subject, []).append(problem)
    kept = tuple(
        dataclasses.replace(
            row, problems=tuple(dict.fromkeys([*row.problems, *by_subject.get(row.found, ())]))
        )
        for row in rows
    )
    return DryAssembly(kept, assembly, tuple(dict.fromkeys(problems)))


def _arranged(
    plugins: Sequence[Plugin], off: Sequence[Selected], wishes: OrderPreferences
) -> tuple[Assembly, list[PluginError]]:
    """Puts plugins in order; one that can't even be looked at is left out, and a problem."""
    problems = []
    kept = []
    for plugin in plugins:
        try:
            arrange([plugin], (), OrderPreferences(installed=wishes.installed))
        except BaseException as error:  # noqa: BLE001
            problems.append(unexpected(plugin, error))
        else:
            kept.append(plugin)
    stand_in = Plugin("task", "task", _stand_in(wishes.owners))
    assembly, misfits = arrange([stand_in, *kept], off, wishes)
    return assembly, [*problems, *misfits]


def _stand_in(owners: Mapping[str, str]) -> object:
    """Makes a task that answers the actions that are given to the task."""

    def answer(state: object) -> None:
        """Stands for the task's own implementation, which isn't known yet."""

    actions = [action for action, owner in owners.items() if owner == "task"]
    return SimpleNamespace(**{action: hookimpl(answer) for action in actions})


def implemented(assembly: Assembly) -> Iterator[tuple[str, Hook]]:
    """Yields the hooks that a plugin or the task's stand-in implements."""
    for name, hook in assembly.hooks.items():
        if assembly.implementations[name].implementations:
            yield name, hook
