"""`eventloop plugins enable NAME`: have an installed plugin take part in all runs of a project."""

from __future__ import annotations

import json
from pathlib import Path

from eventloop.cli.arguments import Arguments, Command, configuration_of
from eventloop.cli.output import write_lines
from eventloop.cli.plugins.list import seen_status
from eventloop.config.layers import find_pyproject
from eventloop.config.rule_edits import has_name, names, with_name, without_name
from eventloop.errors import SettingError, UsageError, closest
from eventloop.files import disk
from eventloop.naming import fold
from eventloop.plugin.candidates import select_all
from eventloop.plugin.records import Selected
from eventloop.plugin.static_check import static_check

COMMAND = Command(
    "plugins enable",
    "Takes NAME out of `disable` in [tool.eventloop] of the nearest pyproject.toml; a plugin that is off "
    "until it is named is added to `required`.",
    argument="NAME",
    takes_plugins=False,
    takes_options=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    switch(arguments, COMMAND, is_on=True)
    return 0


def switch(arguments: Arguments, command: Command, *, is_on: bool) -> None:
    """Writes into `pyproject.toml` whether a plugin takes part, and prints whether it does by now.

    Raises:
        UsageError: no plugin has this name.
        SettingError: the file can't be written, or its table is written in an unknown way.
    """
    one = _named(arguments, command)
    name = one.found.name
    project = find_pyproject(Path.cwd())
    path = (project[0] if project else Path("pyproject.toml")).resolve()
    try:
        text = path.read_bytes().decode() if project else ""
        edited = _enabled(text, one) if is_on else _disabled(text, name)
        if edited != text:
            disk.replace_file(path, edited.encode())
    except (OSError, ValueError) as error:  # not UTF-8 or TOML, or read-only
        what = f"without {name} in disable = [...]" if is_on else f"disable = [{json.dumps(name)}]"
        raise SettingError(
            f"{path} can't be edited: {error}", fix=f"write it by hand: [tool.eventloop] {what}"
        ) from error
    now = _named(arguments, command)
    status, reason = seen_status(now, configuration_of(arguments), ())
    write_lines(
        [f"{name}: {status}{f', {reason}' * bool(reason)}; {path}{' as it was' * (edited == text)}"]
    )


def _named(arguments: Arguments, command: Command) -> Selected:
    selected, _ = select_all(configuration_of(arguments))
    if not arguments.task:
        raise UsageError(
            f"`eventloop {command.name}` needs a NAME",
            fix="list what is installed with `eventloop plugins`",
        )
    named = [one for one in selected if fold(one.found.name) == fold(arguments.task)]
    if not named:
        known = sorted(one.found.name for one in selected)
        raise UsageError(
            f"no plugin is named {arguments.task!r}{closest(arguments.task, known)}",
            fix="list what is installed with `eventloop plugins`",
        )
    return named[0]


def _enabled(text: str, one: Selected) -> str:
    name = one.found.name
    text = without_name(text, "disable", name) if has_name(text, "disable", name) else text
    if names(text, "allow") and not has_name(text, "allow", name):
        text = with_name(text, "allow", name)
    if static_check(one.found).off_until_named and not has_name(text, "required", name):
        text = with_name(text, "required", name)
    return text


def _disabled(text: str, name: str) -> str:
    if has_name(text, "required", name):
        text = without_name(text, "required", name)
    return text if has_name(text, "disable", name) else with_name(text, "disable", name)
