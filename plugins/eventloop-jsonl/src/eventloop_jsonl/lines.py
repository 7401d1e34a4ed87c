"""Numbers and texts as lines of JSON, and a file that holds whole lines only.

JSON has no NaN and no infinities: they are the texts "NaN", "Infinity" and "-Infinity", which
Python's `float` and JavaScript's `Number` read back; an integer beyond the range of floats counts as
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
_OWN = (
    "value",
    "text",
    "table",
    "seconds",
    "run",
)  # keys that differ between two runs that log the same


def lines(numbers: Mapping[str, float], moment: Moment, run: str | None = None) -> str:
    """Returns a line of JSON for each number, with its name, value and moment.

    Args:
        run: identifies this run's lines in a file that several runs share.
    """
    values = {name: f'"value": {_value(value)}' for name, value in numbers.items()}
    return _lines(values, moment, run)


def text_lines(
    texts: Mapping[str, str | Mapping[str, Iterable[Any]]], moment: Moment, run: str | None = None
) -> str:
    """Returns a line of JSON for each text or table, with its name, content and moment."""
    return _lines({name: _text(text) for name, text in texts.items()}, moment, run)


def _lines(values: Mapping[str, str], moment: Moment, run: str | None) -> str:
    moment_json = _encode(moment._asdict() | ({} if run is None else {"run": run}))[1:]
    return "".join(
        f"{_START}{_name(name)}, {value}, {moment_json}\n" for name, value in values.items()
    )


def _name(name: str) -> str:
    # Names are cached, but long names would fill the memory.
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
    columns = (
        f"{_encoded(name)}: [{', '.join(map(_cell, column))}]" for name, column in text.items()
    )
    return f'"table": {{{", ".join(columns)}}}'


def _cell(cell: str | float | None) -> str:
    if isinstance(cell, str):
        return _encoded(cell)
    return "null" if cell is None else _value(cell)


def is_of_run(line: bytes, run: str) -> bool:
    """Whether a line belongs to this run."""
    try:
        row = json.loads(line)
    except ValueError:
        return False
    return isinstance(row, dict) and row.get("run") == run


class Position(NamedTuple):
    """A position in a file that can be found again; equal in two runs that log the same.

    It excludes values and byte offsets, because times differ between runs.

    Args:
        num_lines: number of lines before the position.
        digest: digest of the last of these lines, to detect a different file.
    """

    num_lines: int
    digest: str


class LineFile:
    """A file to which lines are appended, each call as a single write.

    The first use creates the folder, opens the file, and removes an incomplete line that a killed process
    left. Nothing is buffered: when `append` returns, the operating system has the data. A process that
    follows the file sees it, and a forked worker has nothing to write twice.

    Args:
        path: path of the file.
        folder: folder of the run, if the file is in it; refuses links.
    """

    def __init__(self, path: Path, folder: RunFolder | None = None) -> None:
        self.path = path
        self._folder = folder
        self._descriptor: int | None = None
        self._counted = (0, 0)  # numbers of bytes and of lines in them

    def check(self) -> None:
        """Refuses anything but a regular file in the file's place, before a line is written.

        Raises:
            RunFolderError: for example, it is a link.
        """
        if self._folder is not None:
            self._folder.check(self.path.name, in_place=True)

    def append(self, text: str) -> None:
        """Writes whole lines of ASCII text at the end of the file.

        Raises:
            OSError: the file can't be opened or written, or was deleted after it was opened; an
                incomplete write is reverted.
        """
        append_whole(self._open(), text.encode("ascii"))

    def end(self) -> Position:
        """Returns the position at which the next line will be written.

        Raises:
            OSError: the file can't be read.
        """
        if not self.path.is_file():  # doesn't exist yet, or is a pipe
            return Position(0, _digest([]))
        descriptor = self._open()
        num_bytes, num_lines = self._counted
        if os.fstat(descriptor).st_size < num_bytes:  # truncated by another program
            num_bytes = num_lines = 0
        for chunk in _chunks(descriptor, num_bytes):
            num_bytes += len(chunk)
            num_lines += chunk.count(b"\n")
        self._counted = num_bytes, num_lines
        return Position(num_lines, _digest_before(descriptor, num_bytes))

    def cut_after(self, position: Position, is_surplus: Callable[[bytes], bool]) -> bool:
        """Removes the lines after a position, unless any of them isn't surplus.

        Returns:
            Whether the file now ends there. A different or changed file is left unchanged.

        Raises:
            OSError: the file can't be read or written.
        """
        if not self.path.is_file():
            return False
        descriptor = self._open()
        start = _start_of(descriptor, position.num_lines)
        if start is None or _digest_before(descriptor, start) != position.digest:
            return False
        tail = b"".join(_chunks(descriptor, start))
        if not all(map(is_surplus, tail.splitlines())):
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
    """Yields the content of a file from a byte offset on."""
    while chunk := os.pread(descriptor, _CHUNK_BYTES, start):
        yield chunk
        start += len(chunk)


def _start_of(descriptor: int, num_lines: int) -> int | None:
    """Returns the byte offset of a line; None if the file has fewer lines before it."""
    start = 0
    for chunk in _chunks(descriptor, 0):
        num_here = chunk.count(b"\n")
        if num_lines <= num_here:
            newline_end = 0
            for _ in range(num_lines):
                newline_end = chunk.index(b"\n", newline_end) + 1
            return start + newline_end
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
    """Returns the name and the counts of a line, which are equal in two runs that log the same."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # another program's line
        return line
    if not isinstance(row, dict):
        return line
    return json.dumps({key: value for key, value in row.items() if key not in _OWN}).encode()


def _end_line(descriptor: int) -> None:
    """Makes a file end with a newline: removes an incomplete line of ours, ends any other line."""
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
