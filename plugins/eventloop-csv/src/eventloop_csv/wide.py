"""A CSV file with a column for each name, which gets a new column for each new name.

The first columns are the moment of a row. Numbers are written so that `float` reads
the same bits back; NaN and infinities are "nan", "inf" and "-inf".
"""

from __future__ import annotations

import csv
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from eventloop import Moment
from eventloop.toolbox import RunFolder, append_whole

_MOMENT = list(Moment._fields)
_SPECIAL = frozenset(',"\r\n')
_NUM_COUNTS = _MOMENT.index("seconds")  # which differ between runs


class Position(NamedTuple):
    """A position in a file that can be found again; equal in two runs that log the same.

    Args:
        columns: the names with a column.
        num_rows: number of rows before the position.
        last: counts of the last of these rows, to detect a different file.
    """

    columns: list[str]
    num_rows: int
    last: list[str]


class WideFile:
    """A CSV file that rows are appended to.

    When `append` returns, the operating system has the row. A new column rewrites the file and replaces it
    atomically: readers, and a kill, see either the old file or the new one.

    Args:
        folder: folder of the run.
        name: name of the file in it.
    """

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self.path = folder.path / name
        self._descriptor: int | None = None
        self._end = Position([], 0, [])

    def check(self) -> None:
        """Refuses anything but a regular file in the file's place, before a row is written.

        Raises:
            RunFolderError: for example, it is a link.
        """
        self._folder.check(self._name, in_place=True)

    def append(self, numbers: Mapping[str, float], moment: Moment) -> None:
        """Writes a row; new names get a column, which is empty in earlier rows.

        Raises:
            OSError: the file can't be opened or written, or was deleted after it was opened; an
                incomplete write is reverted.
            ValueError, csv.Error: another program's file has its name.
        """
        self._open()
        columns, num_rows, _ = self._end
        by_column = {_text(name): _number(value) for name, value in numbers.items()}
        if new := [name for name in by_column if name not in columns]:
            columns = [*columns, *new]
            self._rewrite(columns, num_rows)
        moment_cells = [_number(value) for value in moment]
        row = [*moment_cells, *(by_column.get(name, "") for name in columns)]
        append_whole(self._open(), _line(row).encode("ascii"))
        self._end = Position(columns, num_rows + 1, moment_cells[:_NUM_COUNTS])

    def end(self) -> Position:
        """Returns the position at which the next row will be written.

        Raises:
            OSError: the file can't be read.
            ValueError, csv.Error: another program's file has its name.
        """
        if self._descriptor is None and not self.path.is_file():
            return Position([], 0, [])
        self._open()
        return self._end

    def cut_after(self, position: Position) -> bool:
        """Removes the rows after a position, and the columns that they introduced.

        Returns:
            Whether the file now ends there. A file without this position is left unchanged.

        Raises:
            OSError: the file can't be read or written.
            ValueError, csv.Error: another program's file has its name.
        """
        if not self.path.is_file():
            return False
        self._open()
        columns = self._end.columns[: len(position.columns)]
        if columns != position.columns or self._last_of(position.num_rows) != position.last:
            return False
        self._rewrite(position.columns, position.num_rows)
        self._end = position
        return True

    def set_aside(self) -> None:
        """Renames the file, `metrics.csv` to `metrics.old.csv`; the next `append` makes another.

        Raises:
            OSError: it can't be renamed.
        """
        self.close()
        self._end = Position([], 0, [])
        self.path.replace(self.path.with_suffix(f".old{self.path.suffix}"))

    def close(self) -> None:
        """Closes the file; the next `append` opens it again."""
        if self._descriptor is not None:
            descriptor = self._descriptor
            self._descriptor = None
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = self._folder.append_to(self._name)
            try:
                self._read()
            except BaseException:
                self.close()
                raise
        return self._descriptor

    def _read(self) -> None:
        """Finds the end of the file, and removes an incomplete row that a killed process may have left."""
        rows = self._rows()
        header = next(rows, None)
        if header is None:
            self._rewrite([], 0)
            return
        if header[: len(_MOMENT)] != _MOMENT:
            raise ValueError(f"its first columns aren't {', '.join(_MOMENT)}")
        is_whole = self._last_byte() == b"\n"
        num_rows = max(0, sum(1 for _ in rows) - (not is_whole))
        columns = header[len(_MOMENT) :]
        self._end = Position(columns, num_rows, self._last_of(num_rows) or [])
        if not is_whole:
            self._rewrite(columns, num_rows)

    def _last_of(self, num_rows: int) -> list[str] | None:
        """Returns the counts of row `num_rows`; None if there are fewer rows."""
        row = next(itertools.islice(self._rows(), num_rows, None), None)
        return row and (row[:_NUM_COUNTS] if num_rows else [])

    def _rows(self) -> Iterator[list[str]]:
        """Yields the rows, the header first."""
        assert self._descriptor is not None
        with os.fdopen(os.dup(self._descriptor), encoding="utf-8", newline="") as file:
            file.seek(0)
            yield from csv.reader(file)

    def _last_byte(self) -> bytes:
        assert self._descriptor is not None
        os.lseek(self._descriptor, -1, os.SEEK_END)
        return os.read(self._descriptor, 1)

    def _rewrite(self, columns: Sequence[str], num_rows: int) -> None:
        """Replaces the file by a file with these columns and the first `num_rows` rows."""
        width = len(_MOMENT) + len(columns)
        with self._folder.replacing(self._name) as path:
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(_line([*_MOMENT, *columns]))
                for row in itertools.islice(self._rows(), 1, 1 + num_rows):
                    file.write(_line([*row, *[""] * width][:width]))
            self.close()  # Windows can't replace an open file
        self._descriptor = self._folder.append_to(self._name)


def _text(name: str) -> str:
    """Returns a name that UTF-8 can encode: an unpaired surrogate is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _line(fields: Iterable[str]) -> str:
    """Returns a row; not with Python's writer, which doesn't quote a lone carriage return."""
    return ",".join(map(_field, fields)) + "\n"


def _field(text: str) -> str:
    if _SPECIAL.isdisjoint(text):
        return text
    quoted = text.replace('"', '""')
    return f'"{quoted}"'


def _number(value: float) -> str:
    if value != value:
        return "nan"
    if abs(value) > sys.float_info.max:
        return "inf" if value > 0 else "-inf"
    return repr(int(value) if isinstance(value, int) else float(value))
