"""The latest texts and tables of a run, each cut to a length that a page can show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eventloop.toolbox import one_line
from eventloop_report.page import Table

MAX_TEXTS = 20
MAX_ROWS = 50
MAX_CHARS = 2_000


class Texts:
    """The latest text of each name, as rows with their columns; of many names those that came last."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[str, Any]] = {}

    def add(self, name: str, batch: int, text: str | Mapping[str, Sequence[Any]]) -> None:
        """Keeps a text in the place of an earlier one of its name."""
        columns = {"text": text.split("\n")} if isinstance(text, str) else text
        rows = zip(*(cells[:MAX_ROWS] for cells in columns.values()), strict=True)
        num_left_out = max(map(len, columns.values()), default=0) - MAX_ROWS
        name = one_line(name, MAX_CHARS)
        self._by_name.pop(name, None)
        self._by_name[name] = {
            "batch": batch,
            "columns": [*map(_cell, columns)],
            "rows": [[*map(_cell, row)] for row in rows],
            "num_left_out": max(0, num_left_out),
        }
        if len(self._by_name) > MAX_TEXTS:
            del self._by_name[next(iter(self._by_name))]

    def tables(self) -> Iterator[Table]:
        """Yields a table for each name."""
        for name, entry in self._by_name.items():
            left_out = entry["num_left_out"]
            suffix = f"; {left_out:,} more rows aren't shown" if left_out else ""
            note = f"Logged after batch {entry['batch']:,}{suffix}."
            yield Table(name, entry["rows"], entry["columns"], note)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything."""
        return {"by_name": [[name, entry] for name, entry in self._by_name.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self._by_name = {name: dict(entry) for name, entry in state["by_name"]}


def _cell(cell: str | float | None) -> str | float:
    if isinstance(cell, str):
        return one_line(cell, MAX_CHARS)
    return "" if cell is None else cell
