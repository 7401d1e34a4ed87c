"""Texts and tables that are logged: what they may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Table = dict[str, list[Any]]
Text = str | Table
_CELLS = (str, int, float, type(None))


class Texts(dict[str, Text]):
    """What was logged as text at one moment, by name: a row beside those of numbers."""


def copied_text(name: str, text: str | Mapping[str, Iterable[Any]]) -> Text:
    """Returns a text, or a copy of a table, that the caller may change from here on.

    Raises:
        TypeError: it is neither, the name is not a text, or a cell is not a text, a number or None.
        ValueError: columns differ in length.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"log_text takes a name first, then a text or a table, not {name!r:.40}")
    if isinstance(text, str):
        return text
    wrong = f"log_text({name!r}, ...) takes a text, or columns of texts and numbers by name, not"
    if not isinstance(text, Mapping):
        raise TypeError(f"{wrong} {type(text).__name__}")
    table: Table = {}
    for column, cells in text.items():
        if isinstance(cells, str) or not isinstance(cells, Iterable):
            raise TypeError(f"{wrong} {type(cells).__name__} as column {column!r}")
        table[str(column)] = copied = list(cells)
        if others := [cell for cell in copied if not isinstance(cell, _CELLS)]:
            raise TypeError(f"{wrong} {type(others[0]).__name__} in column {column!r}")
    lengths = {column: len(cells) for column, cells in table.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"log_text({name!r}, ...) got columns of different lengths: {lengths}")
    return table
