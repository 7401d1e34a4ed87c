"""How commands print: lines, tables and JSON on stdout, failures on stderr; the header is in `header.py`."""

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
from typing import TYPE_CHECKING, Any

import eventloop
from eventloop.distributed.exit import details, first_line, in_ranks
from eventloop.errors import Note, TaskError, UsageError, in_shell, text_of
from eventloop.files.run_folder import why_no_file
from eventloop.safe_text import one_line, plain
from eventloop.signals import is_agreed

if TYPE_CHECKING:
    from rich.console import Console

    from eventloop.plugin.records import Plugin

# Of a line on stdout: a header may well be long.
_MOST_CHARS = 20_000
_LONG_WORD = 20  # letters of one that may be folded
_OURS = str(Path(eventloop.__file__).parent) + os.sep


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects stdout to stderr, also for output that doesn't go through Python."""
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
    """Shows eventloop's warnings without their line of source."""
    usual = warnings.formatwarning

    def short(message: Warning | str, category: type[Warning], file: str, *line: Any) -> str:
        text = in_shell(text_of(message)) if isinstance(message, Warning) else message
        if file.startswith(_OURS):
            return plain(f"{category.__name__}: {text}\n")
        return usual(text, category, file, *line)

    warnings.formatwarning = short  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = usual


def write_text(text: str) -> None:
    """Writes formatted text."""
    if is_heard():
        write_out(f"{text}\n")


def write_out(text: str = "") -> None:
    """Writes text to stdout unchanged, and flushes it.

    Raises:
        UsageError: stdout can't be written, as on a full disk.
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
    """Writes lines; on a terminal, long ones are wrapped with an indent."""
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
        for line in _aligned([columns, *([*map(_one_line, row)] for row in rows)]):
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


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields rows as lines with aligned columns."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _min_width(cells_by_column: Iterable[Sequence[str]]) -> int:
    """Returns the minimum width of a table: only long words are broken."""
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
    """Writes JSON that every parser reads, in the shell's words: numbers that aren't finite become null."""
    write_text(json.dumps(_finite(content), indent=2, allow_nan=False))


def _one_line(text: str) -> str:
    return one_line(in_shell(text), _MOST_CHARS)


def is_heard() -> bool:
    """Returns whether this process prints: only rank 0 does."""
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("RANK", "0") == "0"


def _terminal() -> Console | None:
    """Returns a console if stdout is a terminal; other output doesn't import rich."""
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
    return in_shell(content) if isinstance(content, str) else content


SUFFIX = ".safetensors"


def require_writable(path: Path, option: str = "", suffix: str = SUFFIX) -> None:
    """Checks that an output file can be written.

    Args:
        option: the text before it on the command line: "--export ".
        suffix: the required suffix.

    Raises:
        UsageError: its folder doesn't exist, or it has the wrong suffix.
    """

    def written(path: Path) -> str:
        return f"write `{option}{shlex.quote(str(path))}`"

    if path.suffix != suffix:
        name = option.strip(" -")
        what = "weights and outputs are" if suffix == SUFFIX else f"the {name} is"
        fix = written(path.with_suffix(suffix))
        if name == "export" and not path.suffix:
            fix += f", or `{option}{shlex.quote(str(path))}/` with a plugin that writes a folder, such as export"
        raise UsageError(f"{option}{path}: {what} written as {suffix}", fix=fix)
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
    """Writes to stderr what happened, who caused it, and where.

    The first rank that failed reports; the others check that it did.
    """
    text = f"{first_line(error, in_shell)}\n{details(error, in_shell)}"
    if in_ranks():
        _report_once(error, text)
    else:
        sys.stderr.write(text)


def _report_once(error: BaseException, text: str) -> None:
    from eventloop.distributed.rank_store import (  # one process needs nothing of them
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
            if first is not None and first.reported_by != board.rank:
                # The first rank to end is taken for the culprit, and the others are stopped.
                wait_until(board.is_reported, GRACE_S)
            if not board.claim():
                return
    except RuntimeError:  # the store is gone, and with it the others
        board = None
    sys.stderr.write(text)
    sys.stderr.flush()
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
            ", ".join(f"{name}={value!r}" for name, value in one.options.items()),
        )
        for one in plugins
    ]
    return (f"  {line}" for line in _aligned(rows))
