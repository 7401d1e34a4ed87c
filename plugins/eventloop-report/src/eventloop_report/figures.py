"""The plots: which numbers share one, and their drawing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from eventloop.toolbox import metric_name
from eventloop_report.series import Series

# The colours of Okabe and Ito that are visible on black and white; colour-blind people can tell them apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("-", "--")
# A placeholder, replaced in the page by the colour of its text, which is light where the page is dark.
_INK = "#012345"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eventloop-report",
    "font.size": 9,
    "text.parse_math": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
    ),
}
MAX_PLOTS = 24
MAX_LINES = len(COLOURS) * len(_DASHES)


@dataclass(frozen=True)
class Plot:
    """Lines that share a pair of axes.

    Args:
        title: text above the plot.
        lines: batches and values by the name of each.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


def plots_of(numbers: Mapping[str, Series], eval_sets: Iterable[str]) -> list[Plot]:
    """Groups numbers into plots: loss first, then rates, results, the rest.

    One plot, `accuracy`, shows a metric of training and of all eval sets; each other number of a
    plugin has its own plot.

    Args:
        eval_sets: their names.
    """
    of_sets = {metric_name(eval_set, ""): eval_set for eval_set in eval_sets}
    evaluated = {
        name: evaluated_as for name in numbers if (evaluated_as := _evaluated(name, of_sets))
    }
    metrics = {metric for _, metric in evaluated.values()}
    groups: dict[tuple[int, str], dict[str, Sequence[tuple[float, float]]]] = {}
    for name, series in numbers.items():
        if name.startswith("lr/"):
            key = (1, "learning rate")
            line = name.removeprefix("lr/")
        elif name in evaluated:
            line, metric = evaluated[name]
            key = (0 if metric == "loss" else 2, metric)
        elif name.startswith("train/loss"):
            key = (0, "loss")
            line = "train" + name.removeprefix("train/loss")
        elif name.startswith("train/"):
            metric = name.removeprefix("train/")
            key = (2, metric) if metric in metrics else (3, name)
            line = "train"
        else:
            key = (4, name)
            line = name
        groups.setdefault(key, {})[line] = series.points()
    return [Plot(title, lines) for (_, title), lines in sorted(groups.items(), key=_place)]


def _evaluated(name: str, of_sets: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns the eval set and the metric that a number is of; None where it isn't of any."""
    starts = [start for start in of_sets if name.startswith(start)]
    start = max(starts, key=len, default=None)  # one set may be called as another one begins
    return None if start is None else (of_sets[start], name.removeprefix(start))


def _place(item: tuple[tuple[int, str], object]) -> tuple[int, str]:
    return item[0]


class Drawing:
    """A plot, drawn; its layout, most of the work, is found once for all formats."""

    def __init__(self, plot: Plot) -> None:
        with mpl.rc_context(_STYLE):
            self._figure = _figure(plot)

    def svg(self) -> str:
        """Returns an SVG element, in the colour of the text around it."""
        text = self._saved("svg", transparent=True, metadata={"Date": None}).decode()
        return text[text.index("<svg") :].replace(_INK, "currentColor")

    def png(self) -> bytes:
        """Returns a PNG, dark on white."""
        return self._saved("png")

    def _saved(self, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        with mpl.rc_context(_STYLE):
            self._figure.savefig(file, format=kind, **options)
        return file.getvalue()


def _figure(plot: Plot) -> Figure:
    figure = Figure(figsize=(6, 3), dpi=120)
    axes = figure.subplots()
    names = []
    handles = []
    for idx, (name, points) in enumerate(list(plot.lines.items())[:MAX_LINES]):
        (line,) = axes.plot(
            [batch for batch, _ in points],
            [value for _, value in points],
            _DASHES[idx // len(COLOURS)],
            color=COLOURS[idx % len(COLOURS)],
            linewidth=1.4,
            marker="o" if len(points) < 30 else None,
            markersize=3,
        )
        names.append(readable(name, 30))
        handles.append(line)
    title = readable(plot.title)
    if len(plot.lines) > MAX_LINES:
        title += f" ({MAX_LINES} of {len(plot.lines)} lines)"
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("batch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if names != [title]:
        num_columns = 1 if len(names) <= len(COLOURS) else 2
        axes.legend(handles, names, frameon=False, fontsize=8, ncols=num_columns)
    # Not the figure's own engine: each format would lay it out anew.
    ConstrainedLayoutEngine().execute(figure)
    return figure


def readable(name: str, num_chars: int = 60) -> str:
    """Returns a name that any font can draw on one line."""
    text = "".join(char if char.isprintable() else "?" for char in name)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= num_chars else f"{text[: num_chars - 3]}..."


def file_names(plots: Iterable[Plot]) -> list[str]:
    """Returns a name for each plot's file, made of letters, digits and dashes; no two the same."""
    names: list[str] = []
    for plot in plots:
        slug = "".join(char if char.isascii() and char.isalnum() else "-" for char in plot.title)
        base = slug[:60].strip("-").lower() or "plot"
        names.append(base if base not in names else f"{base}-{len(names)}")
    return names
