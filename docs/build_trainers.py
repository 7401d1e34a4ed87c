"""Draws the chart of the README from `benchmarks/trainers/results.json`: `python docs/build_trainers.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "trainers" / "results.json"
PICTURE = ROOT / "docs" / "images" / "trainers.svg"
MODEL = "perceptron"
SCENARIOS = {
    "shuffled data, dropout": "shuffled data,\ndropout",
    "with random augmentation": "and random\naugmentation",
}
OURS, OTHERS, BAD, TEXT = "#2e9e6b", "#7f93a8", "#d1603d", "#808080"  # on light and dark pages
STYLE = {
    "font.size": 10,
    "svg.fonttype": "path",
    "svg.hashsalt": "eventloop",
    "text.color": TEXT,
}
WIDTH_OF_BARS = 1.0


def main() -> None:
    """Draws the chart."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.2, 3.1), layout="constrained")
        draw(axes, results)
        figure.savefig(PICTURE, transparent=True, metadata={"Date": None})


def draw(axes: Axes, results: Mapping[str, Any]) -> None:
    """Draws a row for each trainer: a bar for the time of a step, and the outcomes of the kills."""
    step = results["steps"][MODEL]
    rows = {module: row for module, row in results["trainers"].items() if "problem" not in row}
    medians = {module: step["ratios"][module][1] for module in rows}
    medians["by_hand"] = 1.0
    longest = max(medians.values())
    columns = [longest * (1.27 + 0.26 * idx) for idx in range(len(SCENARIOS))]
    for position, (module, row) in enumerate(rows.items()):
        color = OURS if module == "with_eventloop" else OTHERS
        axes.barh(position, medians[module], height=0.62, color=color)
        weight = "bold" if module == "with_eventloop" else "normal"
        axes.text(-0.02 * longest, position, row["name"], ha="right", va="center", weight=weight)
        label = f"{medians[module]:.2f}"
        axes.text(medians[module] + 0.015 * longest, position, label, va="center", weight=weight)
        for column, name in zip(columns, SCENARIOS, strict=True):
            is_exact = row[name].get("is_exact", False) and row[name]["is_repeatable"]
            axes.text(
                column, position, "exactly" if is_exact else "no", ha="center", va="center",
                color=OURS if is_exact else BAD, weight=weight,
            )  # fmt: skip
    top = -1.15
    axes.text(
        0, top, f"time of a step, hand-written loop ({step['by_hand_ms']:.1f} ms) = 1", va="center"
    )
    for column, heading in zip(columns, SCENARIOS.values(), strict=True):
        axes.text(column, top, heading, ha="center", va="center", fontsize=9)
    between = sum(columns) / len(columns)
    axes.text(between, top - 0.85, "a killed run continues", ha="center", va="center")
    axes.set_xlim(-0.42 * longest, longest * 1.68)
    axes.set_ylim(len(rows) - 0.5, top - 1.2)
    axes.axis("off")


if __name__ == "__main__":
    main()
