"""`eventloop plugins disable NAME`: disables an installed plugin in a project."""

from __future__ import annotations

from eventloop.cli.arguments import Arguments, Command
from eventloop.cli.plugins.enable import switch

COMMAND = Command(
    "plugins disable",
    "Adds NAME to `disable` in [tool.eventloop] of the nearest pyproject.toml, or of one in this folder, and "
    "takes it out of `required`.",
    argument="NAME",
    takes_plugins=False,
    takes_options=False,
)


def run(arguments: Arguments) -> int:
    """Runs the subcommand."""
    switch(arguments, COMMAND, is_on=False)
    return 0
