"""`eventloop plugins enable`, `disable`: edits the lists of plugins in a project's `pyproject.toml`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomlkit

from eventloop.cli.arguments import Arguments, Command, configuration_of
from eventloop.cli.command_registry import run_command
from eventloop.cli.printing import write_lines
from eventloop.config.config_files import find_pyproject
from eventloop.errors import SettingError, UsageError, closest
from eventloop.files import disk
from eventloop.naming import fold, split_requirement
from eventloop.plugin.assemble import Discovery
from eventloop.plugin.records import Plugin
from eventloop.plugin.static_check import seen_status, static_check

_ENABLE = (
    "Takes NAME out of `disable` in [tool.eventloop] of the nearest pyproject.toml; a plugin that is off "
    "until it is named is added to `required`."
)
_DISABLE = (
    "Adds NAME to `disable` in [tool.eventloop] of the nearest pyproject.toml, or of one in this folder, and "
    "takes it out of `required`."
)


def enable(argv: Sequence[str]) -> int:
    """Runs `eventloop plugins enable`; returns the exit status."""
    return _run("enable", _ENABLE, _enabled, argv)


def disable(argv: Sequence[str]) -> int:
    """Runs `eventloop plugins disable`; returns the exit status."""
    return _run("disable", _DISABLE, _disabled, argv)


def _run(name: str, summary: str, edit: Callable[[str, Plugin], str], argv: Sequence[str]) -> int:
    command = Command(
        f"plugins {name}", summary, argument="NAME", takes_plugins=False, takes_options=False
    )
    return run_command(command, lambda arguments: _switch(arguments, command, edit), argv)


def _switch(arguments: Arguments, command: Command, edit: Callable[[str, Plugin], str]) -> int:
    """Edits `pyproject.toml` for a plugin, and prints whether it is active now.

    Raises:
        UsageError: no plugin has this name.
        SettingError: the file can't be written, or its table can't be edited.
    """
    plugin = _named(arguments, command)
    name = plugin.name
    project = find_pyproject(Path.cwd())
    path = (project[0] if project else Path("pyproject.toml")).resolve()
    try:
        text = path.read_bytes().decode() if project else ""
        edited = edit(text, plugin)
        if edited != text:
            disk.replace_file(path, edited.encode())
    except (OSError, ValueError) as error:  # not UTF-8 or TOML, or read-only
        added, removed = f"disable = [{json.dumps(name)}]", f"without {name} in disable = [...]"
        what = added if edit is _disabled else removed
        raise SettingError(
            f"{path} can't be edited: {error}", fix=f"write it by hand: [tool.eventloop] {what}"
        ) from error
    now = _named(arguments, command)
    status, reason = seen_status(now, configuration_of(arguments), ())
    why = f", {reason}" if reason else ""
    write_lines([f"{name}: {status}{why}; {path}{' as it was' if edited == text else ''}"])
    return 0


def _named(arguments: Arguments, command: Command) -> Plugin:
    configuration = configuration_of(arguments)
    plugins = Discovery(configuration).chosen(configuration)
    if not arguments.task:
        raise UsageError(
            f"`eventloop {command.name}` needs a NAME",
            fix="list what is installed with `eventloop plugins`",
        )
    named = [plugin for plugin in plugins if fold(plugin.name) == fold(arguments.task)]
    if not named:
        known = sorted(plugin.name for plugin in plugins)
        raise UsageError(
            f"no plugin is named {arguments.task!r}{closest(arguments.task, known)}",
            fix="list what is installed with `eventloop plugins`",
        )
    return named[0]


def _enabled(text: str, plugin: Plugin) -> str:
    assert plugin.found is not None
    name = plugin.name
    text = without_name(text, "disable", name) if has_name(text, "disable", name) else text
    if "allow" in _table(text) and not has_name(text, "allow", name):
        text = with_name(text, "allow", name)
    is_off = static_check(plugin.found).off_until_named or _is_left_to_names(text, plugin)
    if is_off and not has_name(text, "required", name):
        text = with_name(text, "required", name)
    return text


def _is_left_to_names(text: str, plugin: Plugin) -> bool:
    """Whether the project's `autoload` leaves out plugins that nothing names."""
    autoload = _table(text).get("autoload", True)
    return autoload is False or (autoload == "callbacks" and plugin.role == "algorithm")


def _disabled(text: str, plugin: Plugin) -> str:
    name = plugin.name
    if has_name(text, "required", name):
        text = without_name(text, "required", name)
    return text if has_name(text, "disable", name) else with_name(text, "disable", name)


_MARK = "\ufeff"  # some editors of Windows begin a file with it


def with_name(text: str, key: str, name: str) -> str:
    """Returns the file with a name added to the list `disable`, `required` or `allow`.

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
    """Returns the file without a name in a list; comments are kept.

    Raises:
        ValueError: the file isn't TOML.
    """
    content = _parsed(text)
    listed = content["tool"]["eventloop"][key]
    for idx in reversed([idx for idx, one in enumerate(listed) if _is(one, name)]):
        del listed[idx]
    return _written(content, text)


def has_name(text: str, key: str, name: str) -> bool:
    """Returns whether a list of the table has a name, with or without versions.

    Raises:
        ValueError: the file isn't TOML.
    """
    return any(_is(one, name) for one in names(text, key))


def names(text: str, key: str) -> list[str]:
    """Returns the entries of a list of the table.

    Raises:
        ValueError: the file isn't TOML.
    """
    return list(_table(text).get(key, ()))


def _table(text: str) -> Any:
    return _parsed(text).get("tool", {}).get("eventloop", {})


def _is(item: str, name: str) -> bool:
    parts = split_requirement(item)
    return fold(parts[0] if parts else item) == fold(name)


def _parsed(text: str) -> Any:
    return tomlkit.parse(text.removeprefix(_MARK).replace("\r\n", "\n"))


def _written(content: Any, text: str) -> str:
    written: str = content.as_string()
    written = written.replace("\n", "\r\n") if "\r\n" in text else written
    return _MARK + written if text.startswith(_MARK) else written
