"""Edits the lists of plugins in a project's `pyproject.toml`, keeping comments and order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from eventloop.cli.arguments import Arguments, Command, configuration_of
from eventloop.cli.printing import write_lines
from eventloop.config.config_files import find_pyproject
from eventloop.errors import SettingError, UsageError, closest
from eventloop.files import disk
from eventloop.naming import fold, split_requirement
from eventloop.plugin.assemble import Discovery
from eventloop.plugin.static_check import seen_status

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin

_BYTE_ORDER_MARK = "\ufeff"  # some editors on Windows write it at the start of a file


def edit_pyproject(
    arguments: Arguments, command: Command, edit: Callable[[str, Plugin], str], by_hand: str
) -> int:
    """Edits `pyproject.toml` for the plugin that a command names; prints the plugin's new status.

    Args:
        arguments: the parsed command line.
        command: the command.
        edit: returns the edited text of the file.
        by_hand: the line to suggest if the file can't be edited; `{name}` is replaced by the name.

    Raises:
        UsageError: no plugin has this name.
        SettingError: the file can't be written, or its table can't be edited.
    """
    plugin = _named_plugin(arguments, command)
    project = find_pyproject(Path.cwd())
    path = (project[0] if project else Path("pyproject.toml")).resolve()
    try:
        text = path.read_bytes().decode() if project else ""
        edited = edit(text, plugin)
        if edited != text:
            disk.replace_file(path, edited.encode())
    except (OSError, ValueError) as error:  # not UTF-8 or TOML, or read-only
        line = by_hand.format(name=json.dumps(plugin.name))
        raise SettingError(
            f"{path} can't be edited: {error}", fix=f"write it by hand: [tool.eventloop] {line}"
        ) from error
    plugin = _named_plugin(arguments, command)  # chosen again, with the edited file
    status, reason = seen_status(plugin, configuration_of(arguments), ())
    comma = ", " if reason else ""
    unchanged = " as it was" if edited == text else ""
    write_lines([f"{plugin.name}: {status}{comma}{reason}; {path}{unchanged}"])
    return 0


def _named_plugin(arguments: Arguments, command: Command) -> Plugin:
    configuration = configuration_of(arguments)
    plugins = Discovery(configuration).chosen(configuration)
    if not arguments.task:
        raise UsageError(
            f"`eventloop {command.name}` needs a NAME",
            fix="list what is installed with `eventloop plugins`",
        )
    for plugin in plugins:
        if fold(plugin.name) == fold(arguments.task):
            return plugin
    names = sorted(plugin.name for plugin in plugins)
    raise UsageError(
        f"no plugin is named {arguments.task!r}{closest(arguments.task, names)}",
        fix="list what is installed with `eventloop plugins`",
    )


def with_name(text: str, key: str, name: str) -> str:
    """Returns the text of the file with a name added to the list `disable`, `required` or `allow`.

    Raises:
        ValueError: the file isn't TOML, or the entry isn't a list in a table.
    """
    content = _parsed(text)
    try:
        tool = content.setdefault("tool", tomlkit.table(is_super_table=True))
        tool.setdefault("eventloop", tomlkit.table()).setdefault(key, tomlkit.array()).append(name)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{key} of [tool.eventloop] is not a list in a table") from error
    return _written(content, text)


def without_name(text: str, key: str, name: str) -> str:
    """Returns the text of the file with a name removed from a list; comments are kept.

    Raises:
        ValueError: the file isn't TOML.
    """
    content = _parsed(text)
    entries = content["tool"]["eventloop"][key]
    for idx in reversed(range(len(entries))):
        if _is_named(entries[idx], name):
            del entries[idx]
    return _written(content, text)


def has_name(text: str, key: str, name: str) -> bool:
    """Returns whether a list of `[tool.eventloop]` has a name, with or without versions.

    Raises:
        ValueError: the file isn't TOML.
    """
    return any(_is_named(entry, name) for entry in project_table(text).get(key, ()))


def project_table(text: str) -> Any:
    """Returns the table `[tool.eventloop]` of a file, or an empty one.

    Raises:
        ValueError: the file isn't TOML.
    """
    return _parsed(text).get("tool", {}).get("eventloop", {})


def _is_named(entry: str, name: str) -> bool:
    """Returns whether an entry names the plugin, with or without versions."""
    requirement = split_requirement(entry)
    return fold(requirement[0] if requirement else entry) == fold(name)


def _parsed(text: str) -> Any:
    return tomlkit.parse(text.removeprefix(_BYTE_ORDER_MARK).replace("\r\n", "\n"))


def _written(content: Any, text: str) -> str:
    written: str = content.as_string()
    if "\r\n" in text:
        written = written.replace("\n", "\r\n")
    if text.startswith(_BYTE_ORDER_MARK):
        written = _BYTE_ORDER_MARK + written
    return written
