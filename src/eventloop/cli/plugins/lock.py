"""`eventloop plugins lock`: records which plugins a project trains with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.cli.arguments import (
    JSON,
    Arguments,
    Command,
    CommandOption,
    configuration_of,
    refuse_flags,
)
from eventloop.cli.output import stdout_to_stderr, write_json, write_lines
from eventloop.config.settings import SETTING_NAMES
from eventloop.errors import PluginError
from eventloop.plugin.candidates import dry_assemble
from eventloop.plugin.lock import NAME, check_lock, lock_path, lock_text, order_digest

if TYPE_CHECKING:
    from eventloop.config.configuration import Configuration
    from eventloop.plugin.candidates import Candidates

_CHECK = CommandOption("check", "", "compare with the lock instead of writing it; 1 if any differs")
COMMAND = Command(
    "plugins lock",
    f"Writes {NAME} beside pyproject.toml: the plugins that take part, with versions, roles, "
    "options, a digest of each of their files, and one of their order. `eventloop fit` then refuses "
    "any difference.",
    (JSON, _CHECK),
    argument="",
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    refuse_flags(arguments, COMMAND, SETTING_NAMES)
    with stdout_to_stderr():
        found = dry_assemble(configuration_of(arguments))
    if found.problems:
        listed = "\n".join(f"{idx}. {one}" for idx, one in enumerate(found.problems, 1))
        raise PluginError(f"what wouldn't run can't be locked\n{listed}")
    path, assembly = lock_path(Path.cwd()), found.assembly
    if "check" in arguments.given:
        _require_file(path)
        check_lock(path, assembly.plugins, assembly.implementations)
        done = "as locked"
    else:
        text = lock_text(assembly.plugins, assembly.implementations)
        path.write_text(text, encoding="utf-8")
        done = "locked"
    names = [one.name for one in assembly.plugins if one.found]
    if "json" in arguments.given:
        digest = order_digest(assembly.implementations)
        write_json({"lock": str(path), "plugins": names, "order": digest})
    else:
        write_lines([f"{path}: {', '.join(names) or 'no plugins'}, {done}"])
    return 0


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise PluginError(
            f"there is no {NAME} to compare with",
            folder=path.parent,
            fix="write one with `eventloop plugins lock`",
        )


def require_lock(configuration: Configuration, candidates: Candidates) -> None:
    """Compares the plugins with the lock; does nothing without one.

    Like `eventloop plugins lock`, it considers installed plugins, independent of the task.

    Raises:
        PluginError: they differ; the message has a diff.
    """
    path = lock_path(Path.cwd())
    if path.is_file():
        assembly = dry_assemble(configuration, candidates=candidates).assembly
        check_lock(path, assembly.plugins, assembly.implementations)
