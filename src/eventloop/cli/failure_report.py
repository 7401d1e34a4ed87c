"""Prints failures on stderr: the error, the plugin that caused it, and the active plugins."""

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
    """Writes an error to stderr, with the plugin that caused it and the location.

    Of several ranks, the first that failed reports; the others check that it did.
    """
    text = f"{first_line(error)}\n{details(error)}"
    if in_ranks():
        _report_once(error, text)
    else:
        _write(text)


def _write(text: str) -> None:
    """Writes a report to stderr, and its first line to the file from which torchrun reads it."""
    sys.stderr.write(text)
    sys.stderr.flush()
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": text.partition("\n")[0]}), "ascii")


def _report_once(error: BaseException, text: str) -> None:
    from eventloop.distributed.rank_store import bulletin, wait_until  # only needed by ranks
    from eventloop.distributed.watchdog import GRACE_S, post

    board = bulletin()
    try:
        if board is not None:
            first_failure = None if is_agreed(error) else post(board, error)
            if first_failure is not None:
                text = first_failure.report
            if first_failure is not None and first_failure.reported_by != board.rank:
                # The launcher takes the first rank that ends for the culprit and stops the others, so
                # wait until the failed rank has reported.
                wait_until(board.is_reported, GRACE_S)
            if not board.claim():
                return
    except RuntimeError:  # the store is gone, because the other ranks have ended
        board = None
    _write(text)
    if board is not None:
        board.set_reported()


@contextmanager
def crash_report() -> Iterator[list[Plugin]]:
    """Adds a note with the active plugins to an exception; it is printed below the error.

    It encloses the trainer, so that failures while the trainer is closed get the note, too.
    `UsageError` and `TaskError` get no note.

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
    """Returns a line for each plugin: name, role, source, options."""
    rows = [
        (
            plugin.name,
            plugin.role,
            f"{plugin.distribution} {plugin.version}" if plugin.distribution else plugin.source,
            ", ".join(f"{name}={value!r}" for name, value in shown_options(plugin.options).items()),
        )
        for plugin in plugins
    ]
    return (f"  {line}" for line in aligned(rows))
