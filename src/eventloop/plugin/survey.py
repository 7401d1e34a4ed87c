"""A survey: the steps from package to order without a task, with problems kept, not raised."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from eventloop.configuration import Configuration
from eventloop.errors import EventloopError, PluginError
from eventloop.hooks import Hook, hookimpl
from eventloop.plugin.assembly import Assembly, Wishes, arrange
from eventloop.plugin.configure import configure, dormant_reason, plugin_options
from eventloop.plugin.discover import discover
from eventloop.plugin.load import Loaded, load
from eventloop.plugin.records import Found, Plugin, Selected, fold
from eventloop.plugin.select import decide, name_problems, rule_problems
from eventloop.plugin.shadow import shadowed


@dataclass(frozen=True)
class Row:
    """What is known of one plugin that was found.

    Args:
        selected: whether it takes part; a dormant one is off.
        target: what its entry point names; None where it wasn't or couldn't be imported.
        plugin: what takes part, where it could be built.
        problems: what keeps it, or the run, from going on.
    """

    selected: Selected
    target: object = None
    plugin: Plugin | None = None
    problems: tuple[EventloopError, ...] = ()

    @property
    def found(self) -> Found:
        """What its metadata says."""
        return self.selected.found


@dataclass(frozen=True)
class Survey:
    """All plugins, in what order they would take part, and everything that is wrong.

    Args:
        rows: a plugin each, in the order of discovery.
        assembly: of those that can take part.
        problems: every problem once; those of a plugin stand in its row too.
    """

    rows: tuple[Row, ...]
    assembly: Assembly
    problems: tuple[EventloopError, ...]

    def row(self, name: str) -> Row | None:
        """Gives the plugin of that name; the one that takes part, where there are several."""
        named = [row for row in self.rows if fold(row.found.name) == fold(name)]
        return next((row for row in named if row.plugin), named[0] if named else None)


def survey(configuration: Configuration) -> Survey:
    """Looks at everything that is installed as a run would, and goes on where it would stop.

    Raises:
        UsageError: the choice or a rule names a plugin that isn't installed.
    """
    choice, rules = configuration.choice, configuration.rules
    found = discover(files=choice.files)
    selected = decide(found, choice, rules)
    unusable = name_problems(selected)
    problems: list[EventloopError] = [
        *dict.fromkeys(unusable.values()),
        *rule_problems(selected, choice, rules),
        *shadowed(selected),
    ]
    rows = [Row(one) if one.found in unusable else _row(one, configuration) for one in selected]
    problems += [problem for row in rows for problem in row.problems]
    problems += _unknown_options(configuration, rows)

    plugins = [row.plugin for row in rows if row.plugin is not None]
    off = [row.selected for row in rows if row.selected.status == "off"]
    owners = {action: str(value.value) for action, value in rules.owners.items()}
    installed = tuple(one.name for one in found)
    assembly, misfits = _arranged(plugins, off, Wishes(rules.edges, owners, installed))
    problems += [*misfits, *rules.order_problems(assembly.hooks, installed)]
    kept = tuple(_with_problems(row, problems) for row in rows)
    return Survey(kept, assembly, tuple(dict.fromkeys(problems)))


def _row(one: Selected, configuration: Configuration) -> Row:
    """Takes one plugin through loading and building, whatever it does on the way."""
    loaded, failures = load([one])
    if not loaded:
        return Row(one, problems=failures)
    try:
        return _built(one, loaded[0], configuration)
    except EventloopError as error:
        return Row(one, loaded[0].target, problems=(error,))
    except Exception as error:  # noqa: BLE001 - a plugin may do anything when it is looked at
        return Row(one, loaded[0].target, problems=(_unexpected(one.found.origin, error),))


def _built(one: Selected, loaded: Loaded, configuration: Configuration) -> Row:
    values = configuration.section(one.found.name)
    reason = dormant_reason(one.found, loaded.target, values)
    if reason and not configuration.insists_on(one.found):
        return Row(Selected(one.found, "off", reason), loaded.target)
    plugin = configure(one.found, loaded.target, values)
    return Row(one, loaded.target, dataclasses.replace(plugin, found=one.found))


def _unknown_options(configuration: Configuration, rows: Iterable[Row]) -> Iterator[EventloopError]:
    options = {
        row.found.name: None if row.target is None else _option_names(row.target) for row in rows
    }
    try:
        configuration.check(options)
    except EventloopError as error:
        yield error


def _option_names(target: object) -> list[str] | None:
    try:
        return list(plugin_options(target))
    except Exception:  # noqa: BLE001 - is a problem of its row already
        return None


def _arranged(
    plugins: Sequence[Plugin], off: Sequence[Selected], wishes: Wishes
) -> tuple[Assembly, list[PluginError]]:
    """Puts plugins in order; one that can't even be looked at is left out, and a problem."""
    problems = []
    kept = []
    for plugin in plugins:
        try:
            arrange([plugin], (), Wishes(installed=wishes.installed))
        except Exception as error:  # noqa: BLE001
            problems.append(_unexpected(plugin.origin, error))
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


def _with_problems(row: Row, problems: Iterable[EventloopError]) -> Row:
    """Gives each row the problems that name its plugin."""
    origin = row.found.origin
    own = [problem for problem in problems if origin in str(problem)]
    return dataclasses.replace(row, problems=tuple(dict.fromkeys([*row.problems, *own])))


def _unexpected(origin: str, error: Exception) -> PluginError:
    problem = PluginError(
        f"{origin.partition(' ')[0]} can't be looked at: {type(error).__name__}: {error}",
        plugin=origin,
        fix=f"mend it, or switch it off with `-p no:{origin.partition(' ')[0]}`",
    )
    problem.__cause__ = error
    return problem


def implemented(assembly: Assembly) -> Iterator[tuple[str, Hook]]:
    """Gives the hooks that a plugin or the task's stand-in implements."""
    for name, hook in assembly.hooks.items():
        if assembly.implementations[name].implementations:
            yield name, hook
