"""What commands write: lines, tables and JSON on stdout, reports of failures on stderr."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import eventloop
from eventloop.distributed.exit import details, first_line, in_ranks
from eventloop.errors import Note, TaskError, UsageError
from eventloop.files.run_folder import why_no_file
from eventloop.signals import is_agreed
from eventloop.text import one_line, plain

if TYPE_CHECKING:
    from rich.console import Console

    from eventloop.plugin.records import Plugin

# Of a line on stdout: a header may well be long.
_MOST_CHARS = 20_000
_LONG_WORD = 20  # letters of one that may be folded
_OURS = str(Path(eventloop.__file__).parent) + os.sep


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Sends to stderr what others write to stdout, programs that don't go through Python too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def short_warnings() -> Iterator[None]:
    """Shows eventloop's own warnings without the line of eventloop that gave them."""
    usual = warnings.formatwarning

    def short(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if filename.startswith(_OURS):
            return plain(f"{category.__name__}: {message}\n")
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = usual


def write_text(text: str) -> None:
    """Writes text that is already laid out."""
    if _is_heard():
        write_out(f"{text}\n")


def write_out(text: str = "") -> None:
    """Writes text to stdout as it is, and sees to it that nothing is left unwritten.

    Raises:
        UsageError: stdout takes nothing, as on a disk that is full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        raise UsageError(
            f"what the command prints can't be written: {error.strerror}",
            fix="make room where stdout leads, or lead it elsewhere",
        ) from error


def write_lines(lines: Iterable[str]) -> None:
    """Writes lines; on a terminal the long ones are folded between words, with an indent."""
    console = _terminal()
    for line in map(_one_line, lines if _is_heard() else ()):
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
    """Writes a table; on a terminal cells are folded, and columns without a word left out.

    Where a terminal is too narrow for that, each row becomes a block of lines.
    """
    if not _is_heard():
        return
    console = _terminal()
    if console is None:
        for line in _aligned([columns, *([*map(_one_line, row)] for row in rows)]):
            write_text(line)
        return
    from rich.table import Table

    filled = [[*map(_one_line, row)] for row in rows]
    kept = [idx for idx, _ in enumerate(columns) if any(row[idx] for row in filled)]
    if _min_width([[columns[idx], *(row[idx] for row in filled)] for idx in kept]) > console.width:
        _write_blocks(
            [columns[idx] for idx in kept], [[row[idx] for idx in kept] for row in filled]
        )
        return
    table = Table(box=None, pad_edge=False)
    for idx in kept:
        table.add_column(columns[idx], overflow="fold")
    for row in filled:
        table.add_row(*(row[idx] for idx in kept))
    console.print(table, markup=False, highlight=False)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields rows as lines whose cells stand below each other."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _min_width(cells_by_column: Iterable[Sequence[str]]) -> int:
    """Returns the width that a table needs to be read: words stay whole, but for long ones."""
    columns = list(cells_by_column)
    words = ([len(word) for cell in cells for word in cell.split()] for cells in columns)
    return sum(min(max(sizes, default=0), _LONG_WORD) for sizes in words) + 2 * (len(columns) - 1)


def _write_blocks(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    width = max(map(len, columns), default=0)
    for row in rows:
        named = zip(columns, row, strict=True)
        write_lines(f"{name:<{width}}  {cell}" for name, cell in named if cell)
        write_text("")


def write_json(content: object) -> None:
    """Writes JSON that every parser reads: numbers that aren't finite become null."""
    write_text(json.dumps(_finite(content), indent=2, allow_nan=False))


def _one_line(text: str) -> str:
    return one_line(text, _MOST_CHARS)


def _is_heard() -> bool:
    """Returns whether this process speaks: of several ranks the first does."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("RANK", "0") == "0"


def _terminal() -> Console | None:
    """Returns a console where stdout is a terminal; what programs read is quick without rich."""
    if not sys.stdout.isatty():
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


SUFFIX = ".safetensors"


def require_writable(path: Path, option: str = "", suffix: str = SUFFIX) -> None:
    """Refuses a path where no such file can be written.

    Args:
        option: what stands before it on the command line: "--export ".
        suffix: what its name must end with.

    Raises:
        UsageError: its folder doesn't exist, or its name doesn't say what it will hold.
    """

    def written(path: Path) -> str:
        return f"write `{option}{shlex.quote(str(path))}`"

    if path.suffix != suffix:
        name = option.strip(" -")
        what = "weights and outputs are" if suffix == SUFFIX else f"the {name} is"
        raise UsageError(
            f"{option}{path}: {what} written as {suffix}", fix=written(path.with_suffix(suffix))
        )
    if not path.parent.is_dir():
        raise UsageError(
            f"{option}{path}: there is no folder {str(path.parent)!r}",
            fix=f"make it with `mkdir -p {shlex.quote(str(path.parent))}`",
        )
    if reason := why_no_file(path):
        raise UsageError(
            f"{option}{path}: it can't be written: {reason}",
            fix=f"give another file: `{option}other{SUFFIX}`",
        )


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
    """Returns a line a plugin: name, role, what it came from, options."""
    rows = [
        (
            one.name,
            one.role,
            f"{one.distribution} {one.version}" if one.distribution else one.source,
            ", ".join(f"{name}={value!r}" for name, value in one.options.items()),
        )
        for one in plugins
    ]
    return (f"  {line}" for line in _aligned(rows))
