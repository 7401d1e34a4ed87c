"""Progress below the cell of a notebook: an HTML fragment, replaced at each update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from html import escape

from eventloop.toolbox import Results, short
from eventloop_progress.bar import Field
from eventloop_progress.logged_texts import Text, html_of

# Shows HTML in the output of a cell, and returns a function that replaces it.
Show = Callable[[str], Callable[[str], None]]
MOST_EVALUATIONS = 20  # rows of the table: the latest evaluations
MOST_TEXTS = 8
_NUMBER = 'style="text-align: right; font-variant-numeric: tabular-nums"'
_BAR = '<progress value="{:.4f}" max="1" style="width: 16em; vertical-align: middle"></progress>'


class Notebook:
    """A bar that moves, the results of each evaluation in a table above it, and notes.

    Args:
        show: shows HTML; by default in the output of the running cell.
    """

    draws = True

    def __init__(self, show: Show | None = None) -> None:
        self._show = show or in_cell
        self._replace: Callable[[str], None] | None = None
        self._rows: deque[tuple[int, int, Results]] = deque(maxlen=MOST_EVALUATIONS)
        self._notes: list[str] = []
        self._texts: dict[str, str] = {}  # the latest text of each name, as HTML
        self._bar = ""

    def draw(self, fields: Sequence[Field], frac: float) -> None:
        """Draws the bar."""
        shown = [field for field in fields if field.text]
        cells = [_BAR.format(frac) if field.is_bar else escape(field.text) for field in shown]
        self._bar = f"<div>{' &nbsp;'.join(cells)}</div>"
        self._write()

    def results(self, epoch: int, batch: int, results: Results) -> None:
        """Adds rows to the table above the bar."""
        if any(results.values()):
            self._rows.append((epoch, batch, results))

    def line(self, line: str) -> None:
        """Shows nothing: the bar and the tables already contain it."""

    def note(self, text: str) -> None:
        """Adds a line below the bar."""
        self._notes.append(text)
        self._write()

    def text(self, name: str, text: Text) -> None:
        """Shows the text above the bar, replacing an earlier text of the same name."""
        self._texts[name] = html_of(name, text)
        while len(self._texts) > MOST_TEXTS:
            del self._texts[next(iter(self._texts))]
        self._write()

    def close(self, *, keep: bool) -> None:
        """Ends the display, with the bar only if `keep`; the next `draw` starts a new one."""
        if self._replace is not None and not keep:
            self._bar = ""
            self._write()
        self._replace = None
        self._rows.clear()
        self._notes = []
        self._texts = {}
        self._bar = ""

    def _write(self) -> None:
        notes = "".join(f"<div><small>{escape(note)}</small></div>" for note in self._notes)
        html = f"<div>{table(self._rows)}{''.join(self._texts.values())}{self._bar}{notes}</div>"
        if self._replace is None:
            self._replace = self._show(html)
        else:
            self._replace(html)


def table(rows: Collection[tuple[int, int, Results]]) -> str:
    """Returns results of evaluations, each with its epoch and batch, as an HTML table."""
    if not rows:
        return ""
    numbers_of_sets = [numbers for _, _, results in rows for numbers in results.values()]
    names = list(dict.fromkeys(name for numbers in numbers_of_sets for name in numbers))
    head = "".join(f"<th {_NUMBER}>{escape(name)}</th>" for name in ("epoch", "batch"))
    head += "<th>data</th>" + "".join(f"<th {_NUMBER}>{escape(name)}</th>" for name in names)
    body = []
    for epoch, batch, results in rows:
        for idx, (dataset, numbers) in enumerate(results.items()):
            moment = ("", "") if idx else (str(epoch), f"{batch:,}")
            values = [short(numbers[name]) if name in numbers else "" for name in names]
            cells = [f"<td {_NUMBER}>{cell}</td>" for cell in (*moment, *values)]
            cells.insert(2, f'<td style="text-align: left">{escape(dataset)}</td>')
            body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def in_cell(html: str) -> Callable[[str], None]:
    """Shows HTML in the output of the running cell."""
    from IPython.display import HTML, display

    handle = display(HTML(html), display_id=True)
    return lambda text: handle.update(HTML(text))
