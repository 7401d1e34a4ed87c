"""Draws `step.svg`, one batch with its hooks, from the pseudo-code of the design: `python docs/build_step.py`.

A box with round ends is an event, one with sharp corners an action, one with a slanted side a question. What
is indented belongs to the default of the action above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DESIGN = ROOT / "docs" / "explanation" / "design.md"
PICTURE = ROOT / "docs" / "images" / "step.svg"
_WIDTH, _ROW, _BOX, _INDENT, _MARGIN = 400, 30, 22, 22, 14
_FILL = {"event": "#dbeafe", "action": "#dcfce7", "question": "#fef3c7"}
_LEGEND = (
    ("event", "every plugin is told"),
    ("action", "one owner does it"),
    ("question", "any plugin may say yes"),
)


class Row(NamedTuple):
    """A line of the loop: how deep it stands, its hooks with their kinds, and words around them."""

    depth: int
    hooks: list[tuple[str, str]]
    words: str


def rows() -> Iterator[Row]:
    """Yields the lines of one batch."""
    text = DESIGN.read_text(encoding="utf-8")
    batch = text.split("        for each batch:\n", 1)[1].split("\n        epoch_end", 1)[0]
    for line in batch.splitlines():
        depth = (len(line) - len(line.lstrip())) // 4 - 3
        code = re.split(r" {2,}", line.strip(), maxsplit=1)[0]
        found = re.findall(r"<(\w+)>|\b(should_\w+)|^(\w+_\w+)$", code)
        hooks = [
            (
                action or question or event,
                "action" if action else "question" if question else "event",
            )
            for action, question, event in found
        ]
        yield Row(depth, hooks, "" if hooks else code)


def picture() -> str:
    """Returns the drawing as SVG."""
    lines = [*rows()]
    height = 2 * _MARGIN + _ROW * (len(lines) + len(_LEGEND)) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#ffffff" stroke="#94a3b8"/>',
    ]
    top = float(_MARGIN)
    for kind, meaning in _LEGEND:
        parts.append(_box(_MARGIN, top, kind, kind))
        parts.append(_text(_MARGIN + 80, top, meaning))
        top += _ROW
    top += 10
    for row in lines:
        left = _MARGIN + row.depth * _INDENT
        for depth in range(row.depth):
            x = _MARGIN + depth * _INDENT + 6
            parts.append(f'<path d="M{x} {top - 4} V{top + _ROW - 4}" stroke="#cbd5e1"/>')
        for name, kind in row.hooks:
            parts.append(_box(left, top, name, kind))
            left += _width(name) + 6
        if row.words:
            parts.append(_text(left, top, row.words))
        top += _ROW
    return "\n".join([*parts, "</svg>\n"])


def _width(name: str) -> float:
    return 7.3 * len(name) + 20


def _text(x: float, top: float, text: str) -> str:
    return f'<text x="{x:g}" y="{top + 15:g}" fill="#0f172a">{escape(text)}</text>'


def _box(x: float, top: float, name: str, kind: str) -> str:
    wide, low = _width(name), top + _BOX
    if kind == "question":
        shape = f'<path d="M{x + 8:g} {top:g} H{x + wide:g} L{x + wide - 8:g} {low:g} H{x:g} Z"'
    else:
        round_ends = _BOX / 2 if kind == "event" else 2
        shape = f'<rect x="{x:g}" y="{top:g}" width="{wide:g}" height="{_BOX}" rx="{round_ends:g}"'
    return f'{shape} fill="{_FILL[kind]}" stroke="#475569"/>{_text(x + 10, top, name)}'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
