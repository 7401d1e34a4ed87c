"""`eventloop plugins list`: lists plugins and whether they are active; imports none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from eventloop.cli.arguments import JSON, Arguments, Command, configuration_of
from eventloop.cli.output import write_json, write_lines, write_table
from eventloop.cli.registry import COMMANDS
from eventloop.config.options import flag
from eventloop.errors import EventloopError, UsageError, raise_all
from eventloop.naming import fold
from eventloop.plugin.candidates import Candidates, found_subjects, select_all
from eventloop.plugin.configure import awaited
from eventloop.plugin.metadata import Installed, extensions, installed_entry_points
from eventloop.plugin.names import extension_problems
from eventloop.plugin.records import Candidate, Found
from eventloop.plugin.static_check import static_check

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


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    configuration = configuration_of(arguments)
    installed = installed_entry_points()
    selected, problems = select_all(configuration, candidates=Candidates(configuration, installed))
    wrong_usage = [one for one in problems if isinstance(one, UsageError)]
    others = [one for one in problems if one not in wrong_usage]
    rows = list(_rows(configuration, selected, others))
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
    configuration: Configuration, selected: Sequence[Candidate], found: Iterable[EventloopError]
) -> Iterator[dict[str, Any]]:
    problems: dict[Found, EventloopError] = {}
    known = {one.found for one in selected}
    unplaced = []
    for problem in found:
        own = [one for one in found_subjects(problem) if one in known]
        for each in own:
            problems.setdefault(each, problem)
        unplaced += [] if own else [problem]
    for one in selected:
        if one.found in problems:
            yield _row(one.found, "problem", problems[one.found].what)
        else:
            yield _row(one.found, *seen_status(one, configuration, known))
    for problem in unplaced:
        columns = dict.fromkeys(_COLUMNS, "")
        name = ", ".join(one.name for one in problem.subjects)
        yield {**columns, "name": name, "status": "problem", "reason": problem.what, "marks": []}


def _extension_rows(installed: Installed) -> Iterator[dict[str, Any]]:
    """Yields what packages add beside plugins, with problems that metadata and files show."""
    found = extensions(installed=installed)
    problems = extension_problems(found, {"command": COMMANDS})
    for one in found:
        reason = problems[one].what if one in problems else static_check(one).problem
        yield _row(one, "problem" if reason else "available", reason)


def seen_status(
    one: Candidate, configuration: Configuration, others: Iterable[Found]
) -> tuple[str, str]:
    """Returns a plugin's status and reason, with a static check's problem or dormancy."""
    if one.status == "off":
        return one.status, one.reason
    seen = static_check(one.found, others)
    name, section = one.found.name, configuration.section(one.found.name)
    if seen.problem:
        return "problem", seen.problem
    if configuration.insists_on(one.found):
        lacking = [flag(option, name) for option in seen.needs if fold(option) not in section]
        return (
            ("problem", f"needs {' and '.join(lacking)}") if lacking else (one.status, one.reason)
        )
    reason = awaited(name, section, seen.needs, seen.wakes_with, seen.off_until_named)
    return ("off", reason) if reason else (one.status, one.reason)


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
