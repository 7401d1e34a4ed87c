"""The report of a failure on stderr: once for all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eventloop.distributed.reports import details, first_line, in_ranks
from eventloop.errors import Note, TaskError, UsageError
from eventloop.signals import is_agreed

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin


def report(error: BaseException) -> None:
    """Writes to stderr what happened, who did it, and where.

    Of several ranks the first to fail reports; the others see to it that it is done.
    """
    text = f"{first_line(error)}\n{details(error)}"
    if in_ranks():
        _report_once(error, text)
    else:
        sys.stderr.write(text)


def _report_once(error: BaseException, text: str) -> None:
    from eventloop.distributed.failure_store import (  # one process needs nothing of them
        bulletin,
        wait_until,
    )
    from eventloop.distributed.watchdog import GRACE_S, post

    board = bulletin()
    try:
        if board is not None:
            first = None if is_agreed(error) else post(board, error)
            if first is not None:
                text = first.report
            if first is not None and first.told_by != board.rank:
                # The first rank to end is taken for the culprit, and the others are stopped.
                wait_until(board.is_told, GRACE_S)
            if not board.claim():
                return
    except RuntimeError:  # the store is gone, and with it the others
        board = None
    sys.stderr.write(text)
    sys.stderr.flush()
    if board is not None:
        board.set_told()


@contextmanager
def crash_report() -> Iterator[list[Plugin]]:
    """Notes the active plugins on an exception that passes; the note is printed below it.

    It encloses the trainer, so that what fails while that is closed has the note, too. What the
    message of a `UsageError` or `TaskError` says is enough to fix it.

    Yields:
        A list to put the active plugins into, once they are known.
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
    """Yields a line a plugin: name, role, what it came from, options."""
    rows = [
        (
            one.name,
            one.role,
            f"{one.distribution} {one.version}" if one.distribution else one.source,
            ", ".join(f"{name}={value!r}" for name, value in one.options.items()),
        )
        for one in plugins
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
