"""What the subcommands share: which checkpoints are meant."""

from __future__ import annotations

import sys
from pathlib import Path

from eventloop.checkpoint.places import checkpoint_at
from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.errors import UsageError
from eventloop.plain import one_line

JSON = CommandOption("json", "", "write JSON instead of text")


def words(arguments: Arguments, command: Command) -> tuple[str, ...]:
    """Gives what stands alone on the command line, all of which is needed.

    Raises:
        UsageError: something is missing.
    """
    missing = command.argument.split()[len(arguments.words) :]
    if missing:
        raise UsageError(
            f"`eventloop {command.name}` needs {' and '.join(missing)}",
            fix=f"write it as `{command.usage}`",
        )
    return arguments.words


def one_checkpoint(word: str) -> Path:
    """Gives the checkpoint that is meant, and tells on stderr of newer ones that can't be used.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, but none verifies.
    """
    path, refused = checkpoint_at(Path(word))
    for one in refused:
        sys.stderr.write(f"{one.path.name} isn't used: {one_line(one.reason)}\n")
    return path
