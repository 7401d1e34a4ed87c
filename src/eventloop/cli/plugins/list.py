"""`eventloop plugins list`: what is installed, and whether it takes part; imports none of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eventloop.cli.arguments import Command, read_arguments, refuse_flags
from eventloop.cli.help import command_help
from eventloop.cli.output import write_json, write_lines, write_table, write_text
from eventloop.cli.plugins.request import JSON, configuration_of
from eventloop.configuration import Configuration
from eventloop.errors import EventloopError, UsageError, raise_all
from eventloop.options import flag
from eventloop.plugin.glance import glance
from eventloop.plugin.records import Found, Selected, fold
from eventloop.plugin.rows import choose
from eventloop.plugin.select import name_problems

COMMAND = Command(
    "plugins list",
    "Lists the installed plugins and whether they take part; imports none of them.",
    (JSON,),
    argument="",
)
_COLUMNS = ("name", "role", "version", "distribution", "status", "reason", "marks")


def run(argv: Sequence[str]) -> int:
    """Runs the subcommand."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(command_help(COMMAND))
        return 0
    refuse_flags(arguments, COMMAND)
    configuration = configuration_of(arguments)
    selected, problems = choose(configuration)
    wrong_usage = [one for one in problems if isinstance(one, UsageError)]
    others = [one for one in problems if one not in wrong_usage]
    rows = list(_rows(configuration, selected, others))
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        write_table(_COLUMNS, [_cells(row) for row in rows])
    else:
        write_lines(["no plugins are installed"])
    raise_all(wrong_usage)
    return 0


def _rows(
    configuration: Configuration, selected: Sequence[Selected], found: Iterable[EventloopError]
) -> Iterator[dict[str, Any]]:
    problems: dict[Found, EventloopError] = {}
    unplaced = []
    named = name_problems(selected)
    for problem in found:
        own = [
            one.found
            for one in selected
            if one.found.origin in str(problem) or str(named.get(one.found)) == str(problem)
        ]
        for each in own:
            problems.setdefault(each, problem)
        unplaced += [] if own else [problem]
    for one in selected:
        if one.found in problems:
            yield _row(one, problems[one.found].what)
        else:
            yield _row(*_seen(one, configuration))
    for problem in unplaced:
        columns = dict.fromkeys(_COLUMNS, "")
        name = problem.what.partition(" ")[0]
        yield {**columns, "name": name, "status": "problem", "reason": problem.what, "marks": []}


def _seen(one: Selected, configuration: Configuration) -> tuple[Selected, str]:
    """Adds what a glance tells of a plugin: a problem, or that it sleeps."""
    if one.status == "off":
        return one, ""
    seen = glance(one.found)
    given = configuration.section(one.found.name)
    lacking = [flag(name, one.found.name) for name in seen.needs if fold(name) not in given]
    if seen.problem or not lacking:
        return one, seen.problem
    if configuration.insists_on(one.found):
        return one, f"needs {' and '.join(lacking)}"
    return Selected(one.found, "off", f"waiting for {' and '.join(lacking)}"), ""


def _row(one: Selected, problem: str) -> dict[str, Any]:
    return {
        "name": one.found.name,
        "role": one.found.role,
        "version": one.found.version,
        "distribution": one.found.distribution,
        "status": "problem" if problem else one.status,
        "reason": problem or one.reason,
        "marks": list(one.found.marks),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    return [*(row[column] for column in _COLUMNS[:-1]), ", ".join(row["marks"])]
