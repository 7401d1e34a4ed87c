"""Draws what methods are worth, and prints the tables, from `benchmarks/evidence/results.json`.

    python docs/build_evidence.py

The intervals are those of `eventloop ablate`: Student's, of differences seed by seed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from scipy import special

from eventloop_experiments.ablate.paired import Difference, paired_difference

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "evidence" / "results.json"
IMAGES = ROOT / "docs" / "images"
GOOD, BAD, OPEN = "#2e9e6b", "#d1603d", "#808080"  # on a light page and on a dark one
STYLE = {
    "axes.edgecolor": "#808080",
    "axes.labelcolor": "#808080",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": "#808080",
    "svg.hashsalt": "eventloop",
    "xtick.color": "#808080",
    "ytick.color": "#808080",
    "ytick.left": False,
}


@dataclass(frozen=True)
class Row:
    """A method beside training without it.

    Args:
        gain: the paired difference, in the unit of the picture; above 0 is better.
        p: of Student's test, two-sided.
    """

    name: str
    mean: float
    std: float
    gain: Difference
    p: float


def main() -> None:
    """Draws the picture and prints the tables."""
    tasks = json.loads(RESULTS.read_text(encoding="utf-8"))
    sys.stdout.write("\n\n".join(tables(tasks)) + "\n")
    draw(tasks)


def tables(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Yields the tables of each task in Markdown: what methods gain, and how rates were chosen."""
    rows = {name: sorted_rows(task) for name, task in tasks.items()}
    holding = holm(rows)
    for name, task in tasks.items():
        yield "\n".join(gain_table(name, task, rows[name], holding))
        yield "\n".join(rate_table(task))


def sorted_rows(task: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of a task, the least gain first."""
    return sorted(rows_of(task), key=lambda row: row.gain.mean)


def rows_of(task: Mapping[str, Any]) -> Iterator[Row]:
    """Compares each row of a task with `none`, or with the one that it names; a control isn't one."""
    by_seed = {name: dict(enumerate(row["values"])) for name, row in task["rows"].items()}
    factor = task["factor"]
    for name, row in task["rows"].items():
        if name == "none" or row.get("is_control"):
            continue
        base = by_seed[row.get("against", "none")]
        values = {seed: factor * value for seed, value in by_seed[name].items()}
        gain = paired_difference(values, {seed: factor * value for seed, value in base.items()})
        assert gain is not None
        assert gain.high is not None
        t = gain.mean / (gain.high - gain.mean) * float(special.stdtrit(gain.num_seeds - 1, 0.975))
        p = 2 * float(special.stdtr(gain.num_seeds - 1, -abs(t)))
        yield Row(name, statistics.fmean(row["values"]), statistics.stdev(row["values"]), gain, p)


def holm(rows: Mapping[str, list[Row]]) -> set[tuple[str, str]]:
    """Returns the comparisons that hold when those of all tasks are looked at together, at 5 %.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    ps = sorted((row.p, (task, row.name)) for task in rows for row in rows[task])
    holding = set()
    for idx, (p, key) in enumerate(ps):
        if p > 0.05 / (len(ps) - idx):
            break
        holding.add(key)
    return holding


def gain_table(
    name: str, task: Mapping[str, Any], rows: list[Row], holding: set[Any]
) -> Iterator[str]:
    """Yields the lines of a table in Markdown, the best method first."""
    digits, scale = task["digits"], task["scale"]
    yield f"| | rate | {task['metric']} | gain | interval | p |"
    yield "| --- | --- | --- | --- | --- | --- |"
    none = task["rows"]["none"]
    spread = f"{scale * statistics.fmean(none['values']):.{digits}f} ± {scale * statistics.stdev(none['values']):.{digits}f}"
    yield f"| none | {none['rate']:g} | {spread} | | | |"
    for row in reversed(rows):
        low, high = row.gain.low, row.gain.high
        mark = "\\*" if row.gain.leaves_zero_out else ""
        mark += "\\*" if (name, row.name) in holding else ""
        yield (
            f"| {row.name} | {task['rows'][row.name]['rate']:g} "
            f"| {scale * row.mean:.{digits}f} ± {scale * row.std:.{digits}f} "
            f"| {row.gain.mean:+.{digits}f} | {low:+.{digits}f} to {high:+.{digits}f}{mark} "
            f"| {row.p:.2g} |"
        )


def rate_table(task: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of a table of what the sweeps found, the best of each row in bold."""
    tuned = {name: row["tuning"] for name, row in task["rows"].items() if "tuning" in row}
    rates = sorted({rate for one in tuned.values() for rate in one}, key=float)
    best_of = max if task["factor"] > 0 else min
    yield f"| {task['metric']} at rate | {' | '.join(rates)} |"
    yield f"| --- |{' --- |' * len(rates)}"
    for name, by_rate in tuned.items():
        best = best_of(by_rate.values())
        cells = []
        for rate in rates:
            value = by_rate.get(rate)
            text = "" if value is None else f"{task['scale'] * value:.{task['rate_digits']}f}"
            cells.append(f"**{text}**" if value == best else text)
        yield f"| {name} | {' | '.join(cells)} |"


def draw(tasks: Mapping[str, Any]) -> None:
    """Draws a panel a task: a line a method, its gain with its interval."""
    rows = {name: sorted_rows(task) for name, task in tasks.items()}
    holding = holm(rows)
    with plt.rc_context(STYLE):
        heights = [len(rows[name]) + 1 for name in tasks]
        figure, panels = plt.subplots(
            len(tasks), 1, figsize=(7.2, 0.9 * len(tasks) + 0.27 * sum(heights)),
            height_ratios=heights, layout="constrained",
        )  # fmt: skip
        for axes, (name, task) in zip(panels, tasks.items(), strict=True):
            draw_panel(axes, rows[name], {row for of, row in holding if of == name})
            axes.set_title(task["title"], fontsize=9, loc="left")
            axes.set_xlabel(task["label"], fontsize=8)
        IMAGES.mkdir(exist_ok=True)
        figure.savefig(IMAGES / "evidence.svg", transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw_panel(axes: Axes, rows: list[Row], holding: set[str]) -> None:
    """Draws the rows of a task; those that hold in colour."""
    for place, row in enumerate(rows):
        low, high = row.gain.low, row.gain.high
        assert low is not None
        assert high is not None
        color = OPEN if row.name not in holding else GOOD if row.gain.mean > 0 else BAD
        axes.plot([low, high], [place, place], color=color, linewidth=3, solid_capstyle="round")
        axes.plot([row.gain.mean], [place], "o", color=color, markersize=7)
    axes.axvline(0, color="#808080", linewidth=1)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(labelsize=8)
    axes.grid(axis="x", color="#808080", alpha=0.25)
    axes.set_axisbelow(True)


if __name__ == "__main__":
    main()
