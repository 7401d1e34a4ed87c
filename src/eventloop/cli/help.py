"""The help of a command: its own options, settings, and those of plugins and task."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from eventloop.config.options import Option, flag

if TYPE_CHECKING:
    from eventloop.cli.arguments import Command

_WIDTH = 88
_INDENT = " " * 6


def command_help(command: Command, sections: Iterable[tuple[str, str]] = ()) -> str:
    """Returns the whole help text.

    Args:
        sections: more headings, each with its text.
    """
    of_plugins = [
        ("-p NAME, -p no:NAME", "insist on a plugin, or switch it off"),
        ("-p FILE.py:CLASS", "add a plugin that isn't packaged"),
    ]
    about = of_plugins if command.takes_plugins else []
    for option in command.all_options().values():
        about.append((f"{flag(option.name)} {option.metavar}".strip(), option.doc))
    parts = [f"usage: {command.usage}", textwrap.fill(command.summary, _WIDTH)]
    if command.takes_task:
        parts.append(
            "TASK is a file or a dotted module with a function `task`, a `Task` object named "
            "`task`, or hook implementations."
        )
    parts.append(_section("options", "\n".join(_entry(*one) for one in about)))
    parts.extend(_section(heading, text) for heading, text in sections)
    return "\n\n".join(parts)


def options_help(options: Mapping[str, Option], section: str = "") -> str:
    """Describes options, each with type and default."""
    return "\n".join(
        _entry(f"{flag(option.name, section)} {option.type_name}", _described(option))
        for option in options.values()
    )


def _described(option: Option) -> str:
    if option.required:
        return f"{option.doc} (required)".strip()
    default = "none" if option.default is None else str(option.default)
    return f"{option.doc} (default: {default})".strip()


def _section(heading: str, text: str) -> str:
    return f"{heading}:\n{text}"


def _entry(name: str, doc: str) -> str:
    wrapped = textwrap.wrap(doc, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([f"  {name}", *wrapped])
