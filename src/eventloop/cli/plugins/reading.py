"""Shared by the subcommands: from a command line to a configuration, and extensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventloop.cli.arguments import (
    Arguments,
    Command,
    CommandOption,
    configuration_of,
    refuse_flags,
)
from eventloop.cli.output import stdout_to_stderr
from eventloop.cli.registry import COMMANDS
from eventloop.config.configuration import Configuration
from eventloop.config.settings import SETTING_NAMES
from eventloop.errors import EventloopError, UsageError, raise_all
from eventloop.naming import fold
from eventloop.plugin.extensions import extension_problems, imported_callable
from eventloop.plugin.metadata import extensions
from eventloop.plugin.records import Found
from eventloop.plugin.static_check import static_check

if TYPE_CHECKING:
    from eventloop.plugin.candidates import DryAssembly
    from eventloop.plugin.metadata import Installed

JSON = CommandOption("json", "", "write JSON instead of a table")
# The names that the core's own have.
_OWN = {"command": COMMANDS}


def dry_assembled(arguments: Arguments, command: Command) -> tuple[Configuration, DryAssembly]:
    """Loads and orders all plugins; their output goes to stderr.

    Raises:
        UsageError: a flag is neither a setting nor an option of a plugin.
    """
    from eventloop.plugin.candidates import (
        dry_assemble,  # kept out of subcommands that import no plugin
    )

    refuse_flags(arguments, command, SETTING_NAMES)
    configuration = configuration_of(arguments)
    with stdout_to_stderr():
        return configuration, dry_assemble(configuration)


def refuse_choice(found: DryAssembly) -> None:
    """Refuses a choice of unknown plugins, after everything else was printed.

    Raises:
        UsageError: the choice has a problem, not a plugin.
    """
    of_plugins = {id(problem) for row in found.rows for problem in row.problems}
    others = [one for one in found.problems if id(one) not in of_plugins]
    raise_all([one for one in others if isinstance(one, UsageError)])


@dataclass(frozen=True)
class Extension:
    """A discovered extension.

    Args:
        reason: why it can't be used, in one line, or "".
        problem: the same in full; None if it was only checked statically.
    """

    found: Found
    reason: str = ""
    problem: EventloopError | None = None

    @property
    def status(self) -> str:
        """The text of the status column."""
        return "problem" if self.reason else "available"


def seen_extensions(installed: Installed) -> Iterator[Extension]:
    """Yields installed extensions, with problems found in metadata and files."""
    found = extensions(installed=installed)
    problems = extension_problems(found, _OWN)
    for one in found:
        if one in problems:
            yield Extension(one, problems[one].what, problems[one])
        else:
            yield Extension(one, static_check(one).problem)


def imported_extensions(name: str | None = None) -> Iterator[Extension]:
    """Imports installed extensions; yields them with their problems.

    Args:
        name: of those to import; by default all.
    """
    found = extensions()
    problems: dict[Found, EventloopError] = {**extension_problems(found, _OWN)}
    for one in found:
        if name is not None and fold(one.name) != fold(name):
            continue
        if one not in problems:
            try:
                with stdout_to_stderr():
                    _import(one)
            except EventloopError as error:
                problems[one] = error
        problem = problems.get(one)
        yield Extension(one, problem.what if problem else "", problem)


def _import(found: Found) -> None:
    if found.role == "storage":
        # A list, which imports no extension, does without all that checkpoints need.
        from eventloop.checkpoint.storage_packages import imported_storage

        imported_storage(found)
    else:
        imported_callable(found)
