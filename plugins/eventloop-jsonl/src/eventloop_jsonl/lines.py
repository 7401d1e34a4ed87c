"""Numbers and texts as lines of JSON, and a file that holds whole lines only.

JSON has no NaN and no infinities: they are the texts "NaN", "Infinity" and "-Infinity", which
Python's `float` and JavaScript's `Number` read back; an integer beyond every float counts as
infinite. Everything is ASCII.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eventloop import Moment
from eventloop.toolbox import RunFolder, append_whole

_encode = json.JSONEncoder(allow_nan=False).encode
_START = '{"name": '
_MOST_CHARS = 200
_CHUNK_BYTES = 2**20
_NUM_DIGESTED = 16
_OWN = ("value", "text", "table", "seconds", "run")  # what two runs that log alike needn't share


def lines(numbers: Mapping[str, float], at: Moment, run: str | None = None) -> str:
    """Returns a line of JSON for each number, with its name, value and moment.

    Args:
        run: what tells this run's lines from those of others, where they may share a file.
    """
    values = {name: f'"value": {_value(value)}' for name, value in numbers.items()}
    return _lines(values, at, run)


def text_lines(
    texts: Mapping[str, str | Mapping[str, Iterable[Any]]], at: Moment, run: str | None = None
) -> str:
    """Returns a line of JSON for each text or table, with its name, itself and its moment."""
    return _lines({name: _text(text) for name, text in texts.items()}, at, run)


def _lines(values: Mapping[str, str], at: Moment, run: str | None) -> str:
    moment = _encode(at._asdict() | ({} if run is None else {"run": run}))[1:]
    return "".join(f"{_START}{_name(name)}, {value}, {moment}\n" for name, value in values.items())


def _name(name: str) -> str:
    # Long ones would fill the memory.
    return _known(name) if len(name) <= _MOST_CHARS else _encoded(name)


@functools.lru_cache(maxsize=1024)
def _known(name: str) -> str:
    return _encoded(name)


def _encoded(name: str) -> str:
    # Half a surrogate pair passes `json` but not a strict parser; UTF-16 joins whole pairs.
    return _encode(name.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _value(value: float) -> str:
    if value != value:
        return '"NaN"'
    if abs(value) <= sys.float_info.max:
        return _encode(value)
    return '"Infinity"' if value > 0 else '"-Infinity"'


def _text(text: str | Mapping[str, Iterable[Any]]) -> str:
    if isinstance(text, str):
        return f'"text": {_encoded(text)}'
    columns = (f"{_encoded(name)}: [{', '.join(map(_cell, one))}]" for name, one in text.items())
    return f'"table": {{{", ".join(columns)}}}'


def _cell(cell: str | float | None) -> str:
    if isinstance(cell, str):
        return _encoded(cell)
    return "null" if cell is None else _value(cell)


def is_of_run(line: bytes, run: str) -> bool:
    """Returns whether `lines` made a line for this run."""
    try:
        found = json.loads(line)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("run") == run


class Position(NamedTuple):
    """A place in a file, to be found again; the same in two runs that log alike.

    Values aren't part of it, nor bytes: two runs share no times.

    Args:
        num_lines: before it.
        digest: of what the last of them are about, so that another file isn't taken for this one.
    """

    num_lines: int
    digest: str


class LineFile:
    """A file that lines are appended to, each call in one piece.

    The first use makes the folder, opens the file, and cuts off half a line that a killed process
    left. Nothing is held back: what `append` was given is in the operating system's hands when it
    returns: a process that follows the file sees it, and a forked worker has nothing to write
    twice.

    Args:
        path: of the file.
        folder: of the run, where the file lies in it and may be a stranger's.
    """

    def __init__(self, path: Path, folder: RunFolder | None = None) -> None:
        self.path = path
        self._folder = folder
        self._descriptor: int | None = None
        self._counted = (0, 0)  # so many bytes have so many lines

    def check(self) -> None:
        """Refuses what is in the run's folder in the place of the file, before there is a line.

        Raises:
            RunFolderError: it is a link, say.
        """
        if self._folder is not None:
            self._folder.check(self.path.name, in_place=True)

    def append(self, text: str) -> None:
        """Writes whole lines of ASCII text at the end of the file.

        Raises:
            OSError: the file can't be opened or written, or was deleted since it was opened; what
                was written of `text` is taken back.
        """
        append_whole(self._open(), text.encode("ascii"))

    def end(self) -> Position:
        """Returns the position at which the next line will be written.

        Raises:
            OSError: the file can't be read.
        """
        if not self.path.is_file():  # not there yet, or a pipe
            return Position(0, _digest([]))
        descriptor = self._open()
        num_bytes, num_lines = self._counted
        if os.fstat(descriptor).st_size < num_bytes:  # cut by someone else
            num_bytes = num_lines = 0
        for chunk in _chunks(descriptor, num_bytes):
            num_bytes += len(chunk)
            num_lines += chunk.count(b"\n")
        self._counted = num_bytes, num_lines
        return Position(num_lines, _digest_before(descriptor, num_bytes))

    def cut_after(self, place: Position, is_surplus: Callable[[bytes], bool]) -> bool:
        """Takes the lines after a place back, unless one of them isn't surplus.

        Returns:
            Whether the file ends there now. Another file, or one that was changed, stays as it is.

        Raises:
            OSError: the file can't be read or written.
        """
        if not self.path.is_file():
            return False
        descriptor = self._open()
        start = _start_of(descriptor, place.num_lines)
        if start is None or _digest_before(descriptor, start) != place.digest:
            return False
        after = b"".join(_chunks(descriptor, start))
        if not all(map(is_surplus, after.splitlines())):
            return False
        os.ftruncate(descriptor, start)
        self._counted = (0, 0)
        return True

    def set_aside(self) -> None:
        """Renames the file, `metrics.jsonl` to `metrics.old.jsonl`; the next `append` makes another.

        Raises:
            OSError: it can't be renamed.
        """
        self.close()
        self._counted = (0, 0)
        self.path.replace(self.path.with_suffix(f".old{self.path.suffix}"))

    def close(self) -> None:
        """Closes the file; the next `append` opens it again."""
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            if self._folder is not None:
                self._descriptor = self._folder.append_to(self.path.name)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
                self._descriptor = os.open(self.path, flags, 0o666)
            _end_line(self._descriptor)
        return self._descriptor


def _chunks(descriptor: int, start: int) -> Iterator[bytes]:
    """Yields what a file holds from a byte on."""
    while chunk := os.pread(descriptor, _CHUNK_BYTES, start):
        yield chunk
        start += len(chunk)


def _start_of(descriptor: int, num_lines: int) -> int | None:
    """Returns the byte offset of a line; None if the file has fewer lines before it."""
    start = 0
    for chunk in _chunks(descriptor, 0):
        num_here = chunk.count(b"\n")
        if num_lines <= num_here:
            at = 0
            for _ in range(num_lines):
                at = chunk.index(b"\n", at) + 1
            return start + at
        num_lines -= num_here
        start += len(chunk)
    return None if num_lines else start


def _digest_before(descriptor: int, num_bytes: int) -> str:
    num_read = min(num_bytes, _CHUNK_BYTES)
    read = os.pread(descriptor, num_read, num_bytes - num_read)
    return _digest(read.splitlines()[-_NUM_DIGESTED:])


def _digest(lines: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(_about(line) + b"\n")
    return digest.hexdigest()


def _about(line: bytes) -> bytes:
    """Returns the name and the counts of a line: what a run that logs alike has, too."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not ours
        return line
    if not isinstance(row, dict):
        return line
    return json.dumps({key: one for key, one in row.items() if key not in _OWN}).encode()


def _end_line(descriptor: int) -> None:
    """Makes a file end with a line: half a one of ours is cut off, anything else is ended."""
    num_bytes = os.fstat(descriptor).st_size
    if not num_bytes:
        return
    half = b""
    start = num_bytes
    while start and b"\n" not in half:  # a text may be long
        stop = start
        start = max(0, start - _CHUNK_BYTES)
        half = os.pread(descriptor, stop - start, start) + half
    half = half.rpartition(b"\n")[2]
    ours = _START.encode()
    if half.startswith(ours) or ours.startswith(half):
        os.ftruncate(descriptor, num_bytes - len(half))
    else:
        os.write(descriptor, b"\n")
