"""The result of an ablation as a picture: a line a variant, a point a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eventloop_experiments.ablate.table import Row
from eventloop_experiments.runs import Metric


def draw(rows: Sequence[Row], metric: Metric, path: Path) -> None:
    """Writes a PNG with a line for each variant: seeds as points, the mean as a vertical stroke.

    A second plot shows the differences to "none" with their intervals.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.45 * len(rows)), layout="constrained")
    value_axes, difference_axes = figure.subplots(1, 2, sharey=True)
    for position, row in enumerate(rows):
        values = list(row.values.values())
        value_axes.plot(values, [position] * len(values), "o", color="tab:blue", alpha=0.5)
        if row.mean is not None:
            value_axes.plot([row.mean], [position], "|", color="black", markersize=18)
        base = row.differences.get("none")
        if base is not None:
            low = base.low
            high = base.high
            difference_axes.plot([base.mean], [position], "o", color="tab:blue")
            if low is not None and high is not None:
                difference_axes.plot([low, high], [position, position], color="tab:blue")
    difference_axes.axvline(0, color="grey", linewidth=0.8)
    for axes in (value_axes, difference_axes):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        # Few, short tick labels: the labels of small numbers would overlap.
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:.4g}")
    value_axes.set_yticks(range(len(rows)), [row.variant.name for row in rows])
    value_axes.set_ylim(len(rows) - 0.5, -0.5)
    better = {True: ", higher is better", False: ", lower is better", None: ""}
    value_axes.set_xlabel(metric.name + better[metric.higher_is_better])
    difference_axes.set_xlabel("difference to none, seed by seed, 95 % interval")
    figure.savefig(path, dpi=150)
