"""Texts and tables that are logged: their types and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Table = dict[str, list[Any]]
Text = str | Table
_CELLS = (str, int, float, type(None))


class Texts(dict[str, Text]):
    """The texts and tables logged at a moment, by name: a row, as a dict of numbers is."""


def copied_text(name: str, text: str | Mapping[str, Iterable[Any]]) -> Text:
    """Returns a text, or a copy of a table, since the caller may change its lists later.

    Raises:
        TypeError: `text` is neither a text nor a table, the name is not a text, or a cell is not a
            text, a number or None.
        ValueError: columns differ in length.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"log_text takes a name first, then a text or a table, not {name!r:.40}")
    if isinstance(text, str):
        return text
    expectation = (
        f"log_text({name!r}, ...) takes a text, or columns of texts and numbers by name, not"
    )
    if not isinstance(text, Mapping):
        raise TypeError(f"{expectation} {type(text).__name__}")
    table: Table = {}
    for column, cells in text.items():
        if isinstance(cells, str) or not isinstance(cells, Iterable):
            raise TypeError(f"{expectation} {type(cells).__name__} as column {column!r}")
        table[str(column)] = copied = list(cells)
        for cell in copied:
            if not isinstance(cell, _CELLS):
                raise TypeError(f"{expectation} {type(cell).__name__} in column {column!r}")
    lengths = {column: len(cells) for column, cells in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"log_text({name!r}, ...) got columns of different lengths: {lengths}")
    return table
