"""The result of an ablation as a picture: a line a variant, a point a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventloop_experiments.ablate.table import Row
from eventloop_experiments.runs import Metric


def draw(rows: Sequence[Row], metric: Metric, path: Path) -> None:
    """Writes a PNG: a line a variant, its seeds as points, its mean as a stroke.

    Beside it the differences to "none" with their intervals.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for place, row in enumerate(rows):
        values = list(row.values.values())
        left.plot(values, [place] * len(values), "o", color="tab:blue", alpha=0.5)
        if row.mean is not None:
            left.plot([row.mean], [place], "|", color="black", markersize=18)
        base = row.differences.get("none")
        if base is not None:
            low = base.low
            high = base.high
            right.plot([base.mean], [place], "o", color="tab:blue")
            if low is not None and high is not None:
                right.plot([low, high], [place, place], color="tab:blue")
    right.axvline(0, color="grey", linewidth=0.8)
    for axes in (left, right):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        # Of small numbers, many or with all their noughts, one would run into the next.
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:.4g}")
    left.set_yticks(range(len(rows)), [row.variant.name for row in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    better = {True: ", higher is better", False: ", lower is better", None: ""}
    left.set_xlabel(metric.name + better[metric.higher_is_better])
    right.set_xlabel("difference to none, seed by seed, 95 % interval")
    figure.savefig(path, dpi=150)
