"""The end of a crash report: which plugins were active."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from eventloop.errors import TaskError, UsageError
from eventloop.plugin.records import Plugin
from eventloop.trainer import Trainer


@contextmanager
def crash_report(trainer: Trainer) -> Iterator[None]:
    """Notes the active plugins on an exception that passes; the note is printed below it.

    What the message of a `UsageError` or `TaskError` says is enough to mend it.
    """
    try:
        yield
    except (UsageError, TaskError):
        raise
    except Exception as error:
        error.add_note("\n".join(["active plugins", *_table(trainer.plugins)]))
        raise


def _table(plugins: tuple[Plugin, ...]) -> Iterator[str]:
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
