"""The line with the bar, laid out for the terminal's current width each time it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.text import Text

GAP = 2
NARROWEST = 8
WIDEST = 40


@dataclass(frozen=True)
class Field:
    """A part of the line.

    Args:
        importance: if the terminal is too narrow, the least important fields are left out.
        is_bar: whether the bar is drawn here; the text only reserves its minimal width.
    """

    text: str
    importance: int
    style: str = ""
    is_bar: bool = False


BAR = Field(" " * NARROWEST, importance=3, is_bar=True)


def fitting(fields: Sequence[Field], width: int) -> list[Field]:
    """Drops the least important fields until the rest fits; keeps at least a single field."""
    shown = [field for field in fields if field.text]
    while len(shown) > 1 and _width(shown) > width:
        shown.remove(min(shown, key=lambda field: field.importance))
    return shown


def _width(fields: Sequence[Field]) -> int:
    return sum(cell_len(field.text) for field in fields) + GAP * (len(fields) - 1)


class Line:
    """A renderable for rich: fields in a row, with the bar as wide as the remaining space."""

    def __init__(self) -> None:
        self.fields: Sequence[Field] = ()
        self.frac = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        shown = fitting(self.fields, width)
        bar_width = min(WIDEST, NARROWEST + width - _width(shown))
        for idx, field in enumerate(shown):
            if idx:
                yield Text(" " * GAP, end="")
            if field.is_bar:
                # Named colours: on 16-colour terminals rich's own turn grey, like an empty bar.
                yield ProgressBar(
                    total=1.0, completed=self.frac, width=bar_width,
                    complete_style="cyan", finished_style="green",
                )  # fmt: skip
            else:
                text = Text(field.text, field.style, no_wrap=True, overflow="ellipsis", end="")
                text.truncate(width, overflow="ellipsis")
                yield text
