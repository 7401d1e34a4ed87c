"""Numbers as lines of JSON, and a file that holds whole lines only.

JSON has no NaN and no infinities: they are the texts "NaN", "Infinity" and "-Infinity", which
Python's `float` and JavaScript's `Number` read back; an integer beyond every float counts as
infinite. Everything is ASCII.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from eventloop import Moment


def lines(numbers: Mapping[str, float], at: Moment) -> str:
    """Gives a line of JSON for each number, with its name, value and moment."""
    moment = json.dumps(at._asdict(), allow_nan=False)[1:]
    return "".join(
        f'{{"name": {_name(name)}, "value": {_value(value)}, {moment}\n'
        for name, value in numbers.items()
    )


@functools.lru_cache(maxsize=1024)
def _name(name: str) -> str:
    # Half a surrogate pair passes `json.dumps` but not a strict parser; UTF-16 joins whole pairs.
    return json.dumps(name.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def _value(value: float) -> str:
    if value != value:
        return '"NaN"'
    if abs(value) <= sys.float_info.max:
        return json.dumps(value, allow_nan=False)
    return '"Infinity"' if value > 0 else '"-Infinity"'


class LineFile:
    """A file that lines are appended to, each call in one piece.

    The first call makes the folder and opens the file. Nothing is held back: what `append` was
    given is in the operating system's hands when it returns, so that a killed process leaves whole
    lines, and a worker process that was forked has nothing to write a second time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def append(self, text: str) -> None:
        """Writes whole lines of ASCII text at the end of the file.

        Raises:
            OSError: the file can't be opened or written; what was written of `text` is taken back.
        """
        if self._descriptor is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self.path, flags, 0o666)
        rest = memoryview(text.encode("ascii"))
        num_bytes_before = os.fstat(self._descriptor).st_size
        try:
            while rest:  # only a disk that is nearly full takes less than all at once
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if num_bytes_before < os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, num_bytes_before)
            raise

    def close(self) -> None:
        """Closes the file; the next `append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
