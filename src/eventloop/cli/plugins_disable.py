"""`eventloop plugins disable`: switches an installed plugin off in a project's `pyproject.toml`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.cli.arguments import Arguments, Command
from eventloop.cli.pyproject_lists import edit_pyproject, has_name, with_name, without_name

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin

COMMAND = Command(
    "plugins disable",
    "Adds NAME to `disable` in [tool.eventloop] of the nearest pyproject.toml, or of a new one in this "
    "folder, and removes it from `required`.",
    argument="NAME",
    takes_plugins=False,
    takes_options=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    return edit_pyproject(arguments, COMMAND, _disabled, "disable = [{name}]")


def _disabled(text: str, plugin: Plugin) -> str:
    if has_name(text, "required", plugin.name):
        text = without_name(text, "required", plugin.name)
    if has_name(text, "disable", plugin.name):
        return text
    return with_name(text, "disable", plugin.name)
