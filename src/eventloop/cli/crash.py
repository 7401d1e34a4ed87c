"""The end of a crash report: which plugins were active."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eventloop.distributed.reports import ACTIVE
from eventloop.errors import TaskError, UsageError

if TYPE_CHECKING:
    from eventloop.plugin.records import Plugin


@contextmanager
def crash_report() -> Iterator[list[Plugin]]:
    """Notes the active plugins on an exception that passes; the note is printed below it.

    It encloses the trainer, so that what fails while that is closed has the note, too. What the
    message of a `UsageError` or `TaskError` says is enough to mend it.

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
            error.add_note("\n".join([ACTIVE, *_table(active)]))
        raise


def _table(plugins: Sequence[Plugin]) -> Iterator[str]:
    """Gives a line a plugin: name, role, what it came from, options."""
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
