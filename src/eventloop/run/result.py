"""The result of a fit, and the HTML that a notebook shows for results and plugins."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from torch import Tensor, nn

from eventloop.errors import counted
from eventloop.plugin.records import Plugin
from eventloop.secret_values import shown_options
from eventloop.training.metrics import scalars_of
from eventloop.training.stops import Stopped
from eventloop.urls import Place

# Entries of a history row that say when it was logged, and aren't plotted.
_POSITION_KEYS = ("epoch", "batch", "sample", "token", "seconds")
# The size of a plot in pixels.
_WIDTH = 220
_HEIGHT = 70


@dataclass(frozen=True)
class Result:
    """The result of a fit.

    Args:
        metrics: the latest evaluation, by data loader and metric name.
        history: a row for each evaluation and for the end of each fit: epoch, batch, sample,
            token, seconds, and the logged numbers by name.
        run_dir: the folder of the run.
        model: the trained model.
        tested_with: the checkpoint of the best evaluation, if the test sets used its weights; None
                for the last weights.
        stopped: the reason why the fit was stopped early, the plugin or signal that requested it, and
            the position; None if the fit ran for its full duration.
    """

    metrics: dict[str, dict[str, Tensor]]
    history: list[dict[str, float]]
    run_dir: Path
    model: nn.Module
    tested_with: Place | None = None
    stopped: Stopped | None = None

    def __repr__(self) -> str:
        numbers = {name: round(value, 4) for name, value in scalars_of(self.metrics).items()}
        rows = counted(len(self.history), "row")
        stopped = "" if self.stopped is None else f", {self.stopped}"
        return f"Result({numbers}, {rows} of history{stopped}, run_dir={str(self.run_dir)!r})"

    def _repr_html_(self) -> str:
        """Returns a plot of each number in the history, and the reason of an early stop, as HTML."""
        names = dict.fromkeys(
            name for row in self.history for name in row if name not in _POSITION_KEYS
        )
        curves = "".join(
            _curve(name, [(row["batch"], row[name]) for row in self.history if name in row])
            for name in names
        )
        stopped = "" if self.stopped is None else f"<div>{escape(str(self.stopped))}</div>"
        folder = f"<div><small>{escape(str(self.run_dir))}</small></div>"
        return f"<div>{curves}{stopped}{folder}</div>"


def _curve(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Returns a plot of a number over the batches, with its last value, as HTML."""
    finite = [(x, y) for x, y in points if abs(y) < float("inf")]
    line = ""
    if finite:
        xs, ys = zip(*finite, strict=True)
        x_range = max(xs) - min(xs) or 1
        y_range = max(ys) - min(ys) or 1
        line = " ".join(
            f"{4 + (x - min(xs)) / x_range * (_WIDTH - 8):.1f},"
            f"{_HEIGHT - 4 - (y - min(ys)) / y_range * (_HEIGHT - 8):.1f}"
            for x, y in finite
        )
    return (
        f'<figure style="display: inline-block; margin: 0 1em 0.5em 0">'
        f"<figcaption><small>{escape(name)} <b>{points[-1][1]:.4g}</b></small></figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}"><polyline points="{line}" fill="none" '
        f'stroke="currentColor" stroke-width="1.5"/></svg></figure>'
    )


_COLUMNS = ("plugin", "role", "package", "options")


def plugin_table(plugins: Iterable[Plugin], off: Iterable[Plugin]) -> str:
    """Returns a table of the active plugins in order, then the inactive plugins with reasons, as HTML."""
    rows = [_row(plugin) for plugin in plugins]
    inactive_rows = [
        (plugin.name, plugin.role, _package(plugin), "off: " + plugin.reason) for plugin in off
    ]
    return (
        f"<table><thead>{_line(_COLUMNS, 'th')}</thead><tbody>"
        f"{''.join(_line(row) for row in rows)}"
        f"{''.join(_line(row, style='opacity: 0.6') for row in inactive_rows)}"
        "</tbody></table>"
    )


def _row(plugin: Plugin) -> Sequence[str]:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    values = shown_options(plugin.options)
    options = ", ".join(f"{name}={short.repr(value)}" for name, value in values.items())
    return (plugin.name, plugin.role, _package(plugin) or plugin.source, options)


def _package(plugin: Plugin) -> str:
    return f"{plugin.distribution} {plugin.version or ''}".strip()


def _line(cells: Iterable[str], tag: str = "td", style: str = "") -> str:
    content = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f'<tr style="{style}">{content}</tr>' if style else f"<tr>{content}</tr>"
