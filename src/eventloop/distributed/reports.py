"""What is said of a failure: first what happened and who did it, then where."""

from __future__ import annotations

import os
import traceback

from eventloop.errors import CheckpointError, EventloopError, UsageError, notes_of
from eventloop.signals import Interrupted, Terminated
from eventloop.text import plain

FAILURE, WRONG_USAGE, NO_CHECKPOINT = 1, 2, 4


def in_ranks() -> bool:
    """Returns whether this process is one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def first_line(error: BaseException) -> str:
    """Says on which rank what happened, and who did it as far as a note tells."""
    line = summary(error)
    if not in_ranks() or isinstance(error, (Interrupted, Terminated)):
        return line
    return f"rank {os.environ['RANK']}: {line}"


def summary(error: BaseException) -> str:
    """Says what happened, and who did it as far as a note tells."""
    text, *_ = str(error).split("\n")
    if isinstance(error, (Interrupted, Terminated)):
        return text
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    about_plugins = notes_of(error, "plugins")
    notes = [one for one in getattr(error, "__notes__", []) if one and one not in about_plugins]
    if not isinstance(error, EventloopError) and notes:
        line = f"{line}; {notes[0].partition(chr(10))[0]}"
    return plain(line)


def exit_status(error: BaseException) -> int:
    """Returns the exit status of the command.

    Returns:
        2 for wrong usage, 4 where a checkpoint can't be used or written, 130 and 143 for signals,
        else 1.
    """
    if isinstance(error, Interrupted):
        return 130
    if isinstance(error, Terminated):
        return 143
    if isinstance(error, CheckpointError):
        return NO_CHECKPOINT
    return WRONG_USAGE if isinstance(error, UsageError) else FAILURE


def details(error: BaseException) -> str:
    """Returns what follows the first line: the rest of a message, or a traceback, and notes."""
    if isinstance(error, (Interrupted, Terminated)):
        return ""
    if not isinstance(error, EventloopError):
        return plain("".join(traceback.format_exception(error)))
    lines = [*str(error).split("\n")[1:], *getattr(error, "__notes__", [])]
    return plain("".join(f"{line}\n" for line in lines))
