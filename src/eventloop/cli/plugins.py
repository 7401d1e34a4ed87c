"""`eventloop plugins`: what is installed, and whether it takes part; imports none of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventloop.cli.arguments import Command, CommandOption, read_arguments
from eventloop.cli.help import command_help
from eventloop.cli.output import write_json, write_lines, write_table, write_text
from eventloop.configuration import Configuration
from eventloop.errors import UsageError, closest
from eventloop.plugin.discover import discover
from eventloop.plugin.select import decide, name_problems

COMMAND = Command(
    "plugins",
    "Lists the installed plugins and whether they take part; imports none of them.",
    (CommandOption("json", "", "write JSON instead of a table"),),
    takes_task=False,
)
_COLUMNS = ("name", "role", "version", "distribution", "status", "reason")


def run(argv: Sequence[str]) -> int:
    """Runs the command."""
    arguments = read_arguments(argv, COMMAND)
    if "help" in arguments.given:
        write_text(command_help(COMMAND))
        return 0
    for key in arguments.flags:
        raise UsageError(
            f"`eventloop plugins` has no option {key!r}{closest(key, COMMAND.all_options())}",
            fix="list its options with `eventloop plugins --help`",
        )
    configuration = Configuration.read(
        choice=arguments.choice, config_file=arguments.path("config")
    )
    rows = list(_rows(configuration))
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        write_table(_COLUMNS, [[row[column] for column in _COLUMNS] for row in rows])
    else:
        write_lines(["no plugins are installed"])
    return 0


def _rows(configuration: Configuration) -> Iterator[dict[str, str]]:
    selected = decide(discover(), configuration.choice)
    problems = name_problems(selected)
    for one in selected:
        problem = problems.get(one.found)
        yield {
            "name": one.found.name,
            "role": one.found.role,
            "version": one.found.version,
            "distribution": one.found.distribution,
            "status": "problem" if problem else one.status,
            "reason": problem.what if problem else one.reason,
        }
