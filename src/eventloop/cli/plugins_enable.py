"""`eventloop plugins enable`: switches an installed plugin on in a project's `pyproject.toml`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.cli.arguments import Arguments, Command
from eventloop.cli.pyproject_lists import (
    edit_pyproject,
    has_name,
    project_table,
    with_name,
    without_name,
)
from eventloop.plugin.static_check import static_check

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin

COMMAND = Command(
    "plugins enable",
    "Removes NAME from `disable` in [tool.eventloop] of the nearest pyproject.toml; a plugin that is off "
    "until it is named is added to `required`.",
    argument="NAME",
    takes_plugins=False,
    takes_options=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    return edit_pyproject(arguments, COMMAND, _enabled, "without {name} in disable = [...]")


def _enabled(text: str, plugin: Plugin) -> str:
    assert plugin.found is not None
    name = plugin.name
    if has_name(text, "disable", name):
        text = without_name(text, "disable", name)
    if "allow" in project_table(text) and not has_name(text, "allow", name):
        text = with_name(text, "allow", name)
    is_off = static_check(plugin.found).off_until_named or _is_left_to_names(text, plugin)
    if is_off and not has_name(text, "required", name):
        text = with_name(text, "required", name)
    return text


def _is_left_to_names(text: str, plugin: Plugin) -> bool:
    """Returns whether the project's `autoload` leaves the plugin out unless it is named."""
    autoload = project_table(text).get("autoload", True)
    if autoload == "callbacks":
        return plugin.role == "algorithm"
    return autoload is False
