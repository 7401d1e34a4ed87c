"""`eventloop plugins list`: what is installed, and whether it takes part; imports none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from eventloop.cli.arguments import Command, read_arguments
from eventloop.cli.help import command_help
from eventloop.cli.output import write_json, write_lines, write_table, write_text
from eventloop.cli.plugins.request import JSON, configuration_of, refuse_flags
from eventloop.configuration import Configuration
from eventloop.errors import PluginError
from eventloop.plugin.discover import discover
from eventloop.plugin.glance import glance
from eventloop.plugin.records import Selected
from eventloop.plugin.select import decide, name_problems, rule_problems

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
    rows = list(_rows(configuration_of(arguments)))
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        write_table(_COLUMNS, [_cells(row) for row in rows])
    else:
        write_lines(["no plugins are installed"])
    return 0


def _rows(configuration: Configuration) -> Iterator[dict[str, Any]]:
    choice, rules = configuration.choice, configuration.rules
    selected = decide(discover(files=choice.files), choice, rules)
    problems: dict[Any, PluginError] = dict(name_problems(selected))
    unplaced = []
    for problem in rule_problems(selected, choice, rules):
        own = [one.found for one in selected if one.found.origin in str(problem)]
        problems.update(dict.fromkeys(own, problem))
        unplaced += [] if own else [problem]
    for one in selected:
        yield _row(one, problems[one.found].what if one.found in problems else _seen(one))
    for problem in unplaced:
        columns = dict.fromkeys(_COLUMNS, "")
        name = problem.what.partition(" ")[0]
        yield {**columns, "name": name, "status": "problem", "reason": problem.what, "marks": []}


def _seen(one: Selected) -> str:
    return glance(one.found) if one.status == "active" else ""


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
