"""Prints failures on stderr: what happened, who caused it, and the active plugins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.cli.printing import aligned
from eventloop.distributed.process_ends import details, first_line, in_ranks
from eventloop.errors import Note, TaskError, UsageError
from eventloop.secret_values import shown_options
from eventloop.signals import is_agreed

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin


def report(error: BaseException) -> None:
    """Writes to stderr what happened, who caused it, and where.

    The first rank that failed reports; the others check that it did.
    """
    text = f"{first_line(error)}\n{details(error)}"
    if in_ranks():
        _report_once(error, text)
    else:
        _write(text)


def _write(text: str) -> None:
    """Writes a report to stderr, and its first line where torchrun reads the message of a process."""
    sys.stderr.write(text)
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text.partition("\n")[0]}), "ascii")


def _report_once(error: BaseException, text: str) -> None:
    from eventloop.distributed.rank_store import bulletin, wait_until  # one process needs none
    from eventloop.distributed.watchdog import GRACE_S, post

    board = bulletin()
    try:
        if board is not None:
            first = None if is_agreed(error) else post(board, error)
            if first is not None:
                text = first.report
            if first is not None and first.reported_by != board.rank:
                # The first rank to end is taken for the culprit, and the others are stopped.
                wait_until(board.is_reported, GRACE_S)
            if not board.claim():
                return
    except RuntimeError:  # the store is gone, and with it the others
        board = None
    _write(text)
    if board is not None:
        board.set_reported()


@contextmanager
def crash_report() -> Iterator[list[Plugin]]:
    """Adds a note with the active plugins to an exception; it is printed below it.

    It encloses the trainer, so failures of its closing get the note, too. `UsageError` and
    `TaskError` get none.

    Yields:
        A list for the active plugins, to fill once they are known.
    """
    active: list[Plugin] = []
    try:
        yield active
    except (UsageError, TaskError):
        raise
    except (Exception, SystemExit) as error:
        if active:
            text = "\n".join(["active plugins", *_table(active)])
            error.add_note(Note(text, "plugins"))
        raise


def _table(plugins: Sequence[Plugin]) -> Iterator[str]:
    """Returns a line per plugin: name, role, source, options."""
    rows = [
        (
            one.name,
            one.role,
            f"{one.distribution} {one.version}" if one.distribution else one.source,
            ", ".join(f"{name}={value!r}" for name, value in shown_options(one.options).items()),
        )
        for one in plugins
    ]
    return (f"  {line}" for line in aligned(rows))
