"""A survey: the steps from package to order without a task, with problems kept, not raised."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from eventloop.hooks import Hook, hookimpl
from eventloop.naming import fold
from eventloop.plugin.assembly import Assembly, Wishes, arrange
from eventloop.plugin.candidates import Row, choose, take_up, unexpected
from eventloop.plugin.records import Plugin, Selected

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.errors import EventloopError, PluginError


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


def survey(configuration: Configuration, given: Collection[str] | None = ()) -> Survey:
    """Looks at everything that is installed as a run would, and goes on where it would stop.

    Args:
        given: names of what is handed over in Python; None where that isn't known yet.
    """
    rules = configuration.rules
    selected, problems = choose(configuration, given)
    rows, failures = take_up(configuration, selected, given)
    plugins = [row.plugin for row in rows if row.plugin is not None]
    off = [row.selected for row in rows if row.selected.status == "off"]
    owners = {action: str(value.value) for action, value in rules.owners.items()}
    installed = tuple(one.found.name for one in selected)
    assembly, misfits = _arranged(plugins, off, Wishes(rules.edges, owners, installed))
    problems += [*failures, *misfits, *rules.order_problems(assembly.hooks, installed)]
    kept = tuple(_with_problems(row, problems) for row in rows)
    return Survey(kept, assembly, tuple(dict.fromkeys(problems)))


def _arranged(
    plugins: Sequence[Plugin], off: Sequence[Selected], wishes: Wishes
) -> tuple[Assembly, list[PluginError]]:
    """Puts plugins in order; one that can't even be looked at is left out, and a problem."""
    problems = []
    kept = []
    for plugin in plugins:
        try:
            arrange([plugin], (), Wishes(installed=wishes.installed))
        except BaseException as error:  # noqa: BLE001
            problems.append(unexpected(plugin.origin, error))
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


def implemented(assembly: Assembly) -> Iterator[tuple[str, Hook]]:
    """Gives the hooks that a plugin or the task's stand-in implements."""
    for name, hook in assembly.hooks.items():
        if assembly.implementations[name].implementations:
            yield name, hook
