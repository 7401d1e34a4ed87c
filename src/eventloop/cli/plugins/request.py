"""What the subcommands share: from a command line to a configuration."""

from __future__ import annotations

from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.configuration import Configuration
from eventloop.errors import UsageError, closest

JSON = CommandOption("json", "", "write JSON instead of a table")


def configuration_of(arguments: Arguments) -> Configuration:
    """Reads what the command line, environment and files say, as `fit` does."""
    return Configuration.read(
        arguments.flags,
        kind="flag",
        choice=arguments.choice,
        config_file=arguments.path("config"),
    )


def refuse_flags(arguments: Arguments, command: Command) -> None:
    """Refuses settings and options where they would have no effect.

    Raises:
        UsageError: there are some.
    """
    for key in arguments.flags:
        raise UsageError(
            f"`eventloop {command.name}` has no option {key!r}"
            f"{closest(key, command.all_options())}",
            fix=f"list its options with `eventloop {command.name} --help`",
        )
