"""What the subcommands share: from a command line to a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.cli.arguments import Arguments, CommandOption
from eventloop.cli.output import stdout_to_stderr
from eventloop.config.configuration import Configuration
from eventloop.errors import UsageError, raise_all

if TYPE_CHECKING:
    from eventloop.plugin.candidates import DryAssembly

JSON = CommandOption("json", "", "write JSON instead of a table")


def configuration_of(arguments: Arguments) -> Configuration:
    """Reads what the command line, environment and files say, as `fit` does."""
    return Configuration.read(
        arguments.flags,
        kind="flag",
        choice=arguments.choice,
        config_file=arguments.path("config"),
    )


def surveyed(arguments: Arguments) -> tuple[Configuration, DryAssembly]:
    """Looks at all plugins, which may print meanwhile: on stdout stands what the command says."""
    from eventloop.plugin.candidates import (
        dry_assemble,  # kept out of subcommands that import no plugin
    )

    configuration = configuration_of(arguments)
    with stdout_to_stderr():
        return configuration, dry_assemble(configuration)


def refuse_choice(found: DryAssembly) -> None:
    """Refuses a choice of plugins that aren't there, when everything else has been written.

    Raises:
        UsageError: there is something wrong with the choice, and with no plugin.
    """
    of_plugins = {id(problem) for row in found.rows for problem in row.problems}
    others = [one for one in found.problems if id(one) not in of_plugins]
    raise_all([one for one in others if isinstance(one, UsageError)])
