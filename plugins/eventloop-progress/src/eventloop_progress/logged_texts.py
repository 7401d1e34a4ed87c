"""Logged texts and tables as a few short lines, or as HTML: safe to show, however long they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from eventloop.toolbox import one_line, short, shortened

MOST_ROWS = 8
MOST_CHARS = 200
Text = str | Mapping[str, Sequence[Any]]
_CELL = 'style="text-align: left; vertical-align: top; white-space: pre-wrap"'


def lines_of(name: str, text: Text) -> Iterator[str]:
    """Yields the name, and the first lines or rows, each on a single line without control characters."""
    yield one_line(shortened(name))
    if isinstance(text, str):
        lines = text.split("\n")
        yield from (f"  {one_line(line, MOST_CHARS)}" for line in lines[:MOST_ROWS])
        left_out = len(lines) - MOST_ROWS
        unit = "lines"
    else:
        for row in _rows(text):
            pairs = zip(text, row, strict=True)
            yield "  " + "  ".join(f"{_cell(column)}: {_cell(cell)}" for column, cell in pairs)
        left_out = _num_rows(text) - MOST_ROWS
        unit = "rows"
    if left_out > 0:
        yield f"  ... {left_out:,} more {unit}"


def html_of(name: str, text: Text) -> str:
    """Returns the name, and the first lines or rows as a table."""
    head = f"<div><b>{escape(shortened(name))}</b></div>"
    if isinstance(text, str):
        _, *lines = lines_of(name, text)
        rows = "".join(f"<tr><td {_CELL}>{escape(line[2:])}</td></tr>" for line in lines)
        return f"{head}<table><tbody>{rows}</tbody></table>"
    columns = "".join(f"<th {_CELL}>{escape(_cell(column))}</th>" for column in text)
    rows = "".join(
        f"<tr>{''.join(f'<td {_CELL}>{escape(_cell(cell))}</td>' for cell in row)}</tr>"
        for row in _rows(text)
    )
    left_out = _num_rows(text) - MOST_ROWS
    footer = f"<div><small>... {left_out:,} more rows</small></div>" if left_out > 0 else ""
    return f"{head}<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>{footer}"


def _rows(table: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    return zip(*(column[:MOST_ROWS] for column in table.values()), strict=True)


def _num_rows(table: Mapping[str, Sequence[Any]]) -> int:
    return max(map(len, table.values()), default=0)


def _cell(cell: str | float | None) -> str:
    if isinstance(cell, str):
        return one_line(cell, MOST_CHARS)
    return "" if cell is None else short(cell)
