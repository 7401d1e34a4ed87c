"""`eventloop plugins list`: the installed plugins and whether they are active, without imports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command, configuration_of
from eventloop.cli.command_registry import COMMANDS
from eventloop.cli.printing import write_json, write_lines, write_table
from eventloop.errors import EventloopError, UsageError, raise_all
from eventloop.plugin.assemble import Discovery
from eventloop.plugin.discover import Installed, extensions, installed_entry_points
from eventloop.plugin.name_problems import extension_problems
from eventloop.plugin.records import Found, Plugin
from eventloop.plugin.registry import found_subjects
from eventloop.plugin.static_check import seen_status, static_check

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration

COMMAND = Command(
    "plugins list",
    "Lists the installed plugins and whether they take part, and the commands, storages and options of "
    "packages; imports none of them.",
    (JSON,),
    argument="",
    takes_options=False,
)
_COLUMNS = ("name", "role", "version", "distribution", "status", "reason", "marks")


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    configuration = configuration_of(arguments)
    installed = installed_entry_points()
    discovery = Discovery(configuration, installed)
    problems = discovery.problems(configuration)
    usage_errors = [problem for problem in problems if isinstance(problem, UsageError)]
    plugin_problems = [problem for problem in problems if problem not in usage_errors]
    rows = list(_rows(configuration, discovery.chosen(configuration), plugin_problems))
    rows += _extension_rows(installed)
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        cells = [[*(row[name] for name in _COLUMNS[:-1]), ", ".join(row["marks"])] for row in rows]
        write_table(_COLUMNS, cells)
    else:
        write_lines(["no plugins are installed"])
    raise_all(usage_errors)
    return 0


def _rows(
    configuration: Configuration, plugins: Sequence[Plugin], problems: Iterable[EventloopError]
) -> Iterator[dict[str, Any]]:
    problem_of: dict[Found, EventloopError] = {}
    discovered = [plugin.found for plugin in plugins if plugin.found is not None]
    other_problems = []
    for problem in problems:
        subjects = [subject for subject in found_subjects(problem) if subject in discovered]
        for subject in subjects:
            problem_of.setdefault(subject, problem)
        if not subjects:
            other_problems.append(problem)
    for plugin in plugins:
        assert plugin.found is not None
        if plugin.found in problem_of:
            yield _row(plugin.found, "problem", problem_of[plugin.found].what)
        else:
            yield _row(plugin.found, *seen_status(plugin, configuration, discovered))
    for problem in other_problems:
        columns = dict.fromkeys(_COLUMNS, "")
        name = ", ".join(subject.name for subject in problem.subjects)
        yield {**columns, "name": name, "status": "problem", "reason": problem.what, "marks": []}


def _extension_rows(installed: Installed) -> Iterator[dict[str, Any]]:
    """Yields the commands, options and storages of packages, with problems that their files show."""
    added = extensions(installed=installed)
    problems = extension_problems(added, {"command": COMMANDS})
    for extension in added:
        if extension in problems:
            reason = problems[extension].what
        else:
            reason = static_check(extension).problem
        yield _row(extension, "problem" if reason else "available", reason)


def _row(discovered: Found, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": discovered.name,
        "role": discovered.role,
        "version": discovered.version,
        "distribution": discovered.local.label if discovered.local else discovered.distribution,
        "status": status,
        "reason": reason,
        "marks": list(discovered.marks),
    }
