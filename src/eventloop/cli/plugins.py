"""`eventloop plugins`: runs a subcommand; `list` tells which plugins are active, and imports none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command, configuration_of
from eventloop.cli.command_registry import (
    COMMANDS,
    SUBCOMMAND_PREFIX,
    SUBCOMMANDS,
    run_added,
    run_command,
)
from eventloop.cli.printing import write_json, write_lines, write_table, write_text
from eventloop.errors import EventloopError, UsageError, closest, raise_all
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
    "Lists the installed plugins and whether they take part, and what packages add beside them; "
    "imports none of them.",
    (JSON,),
    argument="",
    takes_options=False,
)
_COLUMNS = ("name", "role", "version", "distribution", "status", "reason", "marks")


def run_subcommand(argv: Sequence[str]) -> int:
    """Runs the subcommand that `argv` names, by default `list`; returns the exit status.

    Raises:
        UsageError: there is no such subcommand.
    """
    name, rest = "list", list(argv)
    if rest in (["-h"], ["--help"]):
        write_text(_help())
        return 0
    if rest and rest[0] in SUBCOMMANDS:
        name, *rest = rest
    elif rest and not rest[0].startswith("-"):
        raise UsageError(
            f"`eventloop plugins` has no subcommand {rest[0]!r}{closest(rest[0], SUBCOMMANDS)}",
            fix=f"one of {', '.join(SUBCOMMANDS)}",
        )
    if name == "list":
        return run_command(COMMAND, _run, rest)
    return run_added(f"{SUBCOMMAND_PREFIX}{name}", rest)


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {what}" for name, what in SUBCOMMANDS.items())
    return (
        "usage: eventloop plugins [SUBCOMMAND] ...\n\n"
        "Shows what is installed, what takes part, and in which order.\n\n"
        f"subcommands:\n{listed}\n\n"
        "See also `eventloop plugins SUBCOMMAND --help`; `--json` makes a table JSON; "
        "`-p` and `--no-plugins` choose as for `fit`."
    )


def _run(arguments: Arguments) -> int:
    configuration = configuration_of(arguments)
    installed = installed_entry_points()
    discovery = Discovery(configuration, installed)
    problems = discovery.problems(configuration)
    wrong_usage = [one for one in problems if isinstance(one, UsageError)]
    others = [one for one in problems if one not in wrong_usage]
    rows = list(_rows(configuration, discovery.chosen(configuration), others))
    rows += _extension_rows(installed)
    if "json" in arguments.given:
        write_json(rows)
    elif rows:
        cells = [[*(row[name] for name in _COLUMNS[:-1]), ", ".join(row["marks"])] for row in rows]
        write_table(_COLUMNS, cells)
    else:
        write_lines(["no plugins are installed"])
    raise_all(wrong_usage)
    return 0


def _rows(
    configuration: Configuration, plugins: Sequence[Plugin], found: Iterable[EventloopError]
) -> Iterator[dict[str, Any]]:
    problems: dict[Found, EventloopError] = {}
    known = [plugin.found for plugin in plugins if plugin.found is not None]
    unplaced = []
    for problem in found:
        subjects = [subject for subject in found_subjects(problem) if subject in known]
        for subject in subjects:
            problems.setdefault(subject, problem)
        if not subjects:
            unplaced.append(problem)
    for plugin in plugins:
        assert plugin.found is not None
        if plugin.found in problems:
            yield _row(plugin.found, "problem", problems[plugin.found].what)
        else:
            yield _row(plugin.found, *seen_status(plugin, configuration, known))
    for problem in unplaced:
        columns = dict.fromkeys(_COLUMNS, "")
        name = ", ".join(subject.name for subject in problem.subjects)
        yield {**columns, "name": name, "status": "problem", "reason": problem.what, "marks": []}


def _extension_rows(installed: Installed) -> Iterator[dict[str, Any]]:
    """Yields what packages add beside plugins, with problems that metadata and files show."""
    found = extensions(installed=installed)
    problems = extension_problems(found, {"command": COMMANDS})
    for one in found:
        reason = problems[one].what if one in problems else static_check(one).problem
        yield _row(one, "problem" if reason else "available", reason)


def _row(found: Found, status: str, reason: str) -> dict[str, Any]:
    return {
        "name": found.name,
        "role": found.role,
        "version": found.version,
        "distribution": found.local.label if found.local else found.distribution,
        "status": status,
        "reason": reason,
        "marks": list(found.marks),
    }
