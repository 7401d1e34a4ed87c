"""What the subcommands share: which checkpoints are meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from eventloop.checkpoint.storage import checkpoint_at
from eventloop.cli.arguments import Arguments, Command, CommandOption
from eventloop.errors import UsageError
from eventloop.text import one_line
from eventloop.urls import Place, place_of

JSON = CommandOption("json", "", "write JSON instead of text")


def words(arguments: Arguments, command: Command) -> tuple[str, ...]:
    """Returns what stands alone on the command line, all of which is needed.

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


@contextmanager
def one_checkpoint(word: str) -> Iterator[tuple[Path, Place]]:
    """Yields the checkpoint that is meant, and reports newer ones that can't be used on stderr.

    Yields:
        Its folder, or a copy of it while the `with` lasts; and what it is called.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, but none verifies.
    """
    place = place_of(word)
    if isinstance(place, Path):
        path, refused = checkpoint_at(place)
        _tell((one.path, one.reason) for one in refused)
        yield path, path
        return
    from eventloop.cli.checkpoints.remote import downloaded

    with downloaded(place) as (path, url, passed_over):
        _tell(passed_over)
        yield path, url


def _tell(refused: Iterable[tuple[Place, str]]) -> None:
    for place, reason in refused:
        sys.stderr.write(f"{place.name} isn't used: {one_line(reason)}\n")
