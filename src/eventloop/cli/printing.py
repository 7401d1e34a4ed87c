"""Prints lines, tables and JSON on stdout, and warnings; failures are printed by `failure_report.py`."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eventloop
from eventloop.distributed.process_ends import in_ranks
from eventloop.errors import UsageError, text_of
from eventloop.safe_text import one_line, plain

if TYPE_CHECKING:
    from rich.console import Console


# The maximum length of a line on stdout; a header may be long.
_MOST_CHARS = 20_000
_LONG_WORD = 20  # words with more letters may be broken
_OURS = str(Path(eventloop.__file__).parent) + os.sep


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects stdout to stderr, including output that doesn't go through Python."""
    sys.stdout.flush()
    saved_stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Prints eventloop's own warnings without their line of source."""
    default_format = warnings.formatwarning

    def short_format(message: Warning | str, category: type[Warning], file: str, *line: Any) -> str:
        text = text_of(message) if isinstance(message, Warning) else message
        if file.startswith(_OURS):
            return plain(f"{category.__name__}: {text}\n")
        return default_format(text, category, file, *line)

    warnings.formatwarning = short_format  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = default_format


def write_text(text: str) -> None:
    """Writes formatted text."""
    if is_heard():
        write_out(f"{text}\n")


def write_out(text: str = "") -> None:
    """Writes text to stdout unchanged.

    Raises:
        UsageError: stdout can't be written, for example because the disk is full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        raise UsageError(
            f"the command's output can't be written: {error.strerror}",
            fix="free space where stdout is redirected to, or redirect it elsewhere",
        ) from error


def write_lines(lines: Iterable[str]) -> None:
    """Writes lines; on a terminal, long lines are wrapped with an indent."""
    console = _terminal()
    for line in map(_one_line, lines if is_heard() else ()):
        if console is None:
            write_text(line)
            continue
        folded = textwrap.wrap(
            line,
            max(console.width, 40),
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print("\n".join(folded), markup=False, highlight=False, soft_wrap=True)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Writes a table; on a terminal, cells are wrapped and empty columns omitted.

    If the terminal is too narrow, each row becomes a block of lines.
    """
    if (console := _terminal()) is None:
        for line in aligned([columns, *([*map(_one_line, row)] for row in rows)]):
            write_text(line)
        return
    from rich.table import Table

    filled = [[*map(_one_line, row)] for row in rows]
    shown = [idx for idx, _ in enumerate(columns) if any(row[idx] for row in filled)]
    names = [columns[idx] for idx in shown]
    if _min_width([[columns[idx], *(row[idx] for row in filled)] for idx in shown]) > console.width:
        _write_blocks(names, [[row[idx] for idx in shown] for row in filled])
        return
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in filled:
        table.add_row(*(row[idx] for idx in shown))
    console.print(table, markup=False, highlight=False)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields rows as lines with aligned columns."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _min_width(cells_by_column: Iterable[Sequence[str]]) -> int:
    """Returns the minimum width of a table in which only long words are broken."""
    columns = list(cells_by_column)
    words = ([len(word) for cell in cells for word in cell.split()] for cells in columns)
    return sum(min(max(sizes, default=0), _LONG_WORD) for sizes in words) + 2 * (len(columns) - 1)


def _write_blocks(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    width = max(map(len, columns), default=0)
    for row in rows:
        pairs = zip(columns, row, strict=True)
        write_lines(f"{name:<{width}}  {cell}" for name, cell in pairs if cell)
        write_text("")


def write_json(content: object) -> None:
    """Writes standard JSON, in which numbers that aren't finite become null."""
    write_text(json.dumps(_finite(content), indent=2, allow_nan=False))


def _one_line(text: str) -> str:
    return one_line(text, _MOST_CHARS)


def is_heard() -> bool:
    """Returns whether this process prints; only rank 0 does."""
    return not in_ranks() or os.environ.get("RANK", "0") == "0"


def _terminal() -> Console | None:
    """Returns a console if stdout is a terminal; only then is rich imported."""
    if not (is_heard() and sys.stdout.isatty()):
        return None
    from rich.console import Console

    return Console(file=sys.stdout)


def _finite(content: object) -> object:
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return None
    return content
