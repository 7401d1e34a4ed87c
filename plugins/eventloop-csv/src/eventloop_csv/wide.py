"""A CSV file with a column for each name, which gets a column when a name is new.

The first columns are the moment that a row belongs to. Numbers are written so that `float` reads
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
_NUM_COUNTS = _MOMENT.index("seconds")  # which no two runs share


class Position(NamedTuple):
    """A place in a file, to be found again; the same in two runs that log alike.

    Args:
        columns: the names that have a column.
        num_rows: before it.
        last: the counts of the last of them, so that another file isn't taken for this one.
    """

    columns: list[str]
    num_rows: int
    last: list[str]


class WideFile:
    """A CSV file that rows are appended to.

    A row is in the operating system's hands when `append` returns. A new column is a new file in
    the place of the old one: a reader sees the one or the other, a kill leaves the one or the other.

    Args:
        folder: of the run.
        name: of the file in it.
    """

    def __init__(self, folder: RunFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self.path = folder.path / name
        self._descriptor: int | None = None
        self._end = Position([], 0, [])

    def check(self) -> None:
        """Refuses what is in the run's folder in the place of the file, before there is a row.

        Raises:
            RunFolderError: it is a link, say.
        """
        self._folder.check(self._name, in_place=True)

    def append(self, numbers: Mapping[str, float], at: Moment) -> None:
        """Writes a row; names that have no column get one, and the rows before have nothing there.

        Raises:
            OSError: the file can't be opened or written, or was deleted since it was opened; what
                was written of the row is taken back.
            ValueError, csv.Error: another program's file has its name.
        """
        self._open()
        columns, num_rows, _ = self._end
        by_column = {_text(name): _number(value) for name, value in numbers.items()}
        if new := [name for name in by_column if name not in columns]:
            columns = [*columns, *new]
            self._rewrite(columns, num_rows)
        moment = [_number(one) for one in at]
        row = [*moment, *(by_column.get(name, "") for name in columns)]
        append_whole(self._open(), _line(row).encode("ascii"))
        self._end = Position(columns, num_rows + 1, moment[:_NUM_COUNTS])

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

    def cut_after(self, place: Position) -> bool:
        """Takes the rows after a place back, and the columns that came with them.

        Returns:
            Whether the file ends there now. One that has no such place stays as it is.

        Raises:
            OSError: the file can't be read or written.
            ValueError, csv.Error: another program's file has its name.
        """
        if not self.path.is_file():
            return False
        self._open()
        columns = self._end.columns[: len(place.columns)]
        if columns != place.columns or self._last_of(place.num_rows) != place.last:
            return False
        self._rewrite(place.columns, place.num_rows)
        self._end = place
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
        """Finds the end of the file, without the half row that a killed process may have left."""
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
        """Returns the counts of the last of so many rows; None where there are fewer."""
        last = next(itertools.islice(self._rows(), num_rows, None), None)
        return last and (last[:_NUM_COUNTS] if num_rows else [])

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
        """Puts a file with these columns and the first rows in the place of this one."""
        width = len(_MOMENT) + len(columns)
        with self._folder.replacing(self._name) as path:
            with path.open("w", encoding="utf-8", newline="") as file:
                file.write(_line([*_MOMENT, *columns]))
                for row in itertools.islice(self._rows(), 1, 1 + num_rows):
                    file.write(_line([*row, *[""] * width][:width]))
            self.close()  # Windows replaces no file that is open
        self._descriptor = self._folder.append_to(self._name)


def _text(name: str) -> str:
    """Returns a name as UTF-8 can hold it: half a surrogate pair is written as its escape."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _line(fields: Iterable[str]) -> str:
    """Returns a row; Python's writer leaves a lone carriage return without quotes."""
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
