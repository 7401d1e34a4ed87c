"""Trains each example, and draws its curves for the page of examples.

    python docs/build_gallery.py [NAME ...]

All of them take some minutes on two cores. Without a name, all examples are trained.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eventloop import Moment, StateView, Task, Trainer, hookimpl

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images" / "gallery"
# What is drawn of each example: on the left while it trains, on the right when it is evaluated.
CURVES: Mapping[str, tuple[str, str]] = {
    "charlm": ("train/loss", "held_out/bits"),
    "digits": ("train/loss", "test/accuracy"),
    "finetune": ("train/loss", "test/accuracy"),
    "gan": ("train/loss.D", "train/loss.G"),
    "glyphs": ("train/loss", "test/accuracy"),
    "graph": ("train/loss", "unknown/accuracy"),
    "hf_text": ("train/loss", "test/accuracy"),
    "losses": ("loss/name", "loss/draw"),
    "ppo": ("train/loss", "ppo/steps_balanced"),
    "reinforce": ("train/loss", "reward"),
    "tbptt": ("train/loss", "train/grad_norm.adam"),
}
# Readable on a light page and on a dark one.
STYLE = {
    "axes.edgecolor": "#808080",
    "axes.labelcolor": "#808080",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": "#808080",
    "svg.hashsalt": "eventloop",
    "xtick.color": "#808080",
    "ytick.color": "#808080",
}


class Numbers:
    """Keeps every logged number."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = defaultdict(list)

    @hookimpl
    def log(self, state: StateView, numbers: Mapping[str, float], at: Moment) -> None:
        """Keeps numbers, each at its batch."""
        for name, value in numbers.items():
            self.curves[name].append((at.batch, value))


def main() -> None:
    """Draws the curves of the examples that are named."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or CURVES:
        curves = train(name)
        with plt.rc_context(STYLE):
            figure, both = plt.subplots(1, 2, figsize=(7, 2.2), layout="constrained")
            for axes, curve in zip(both, CURVES[name], strict=True):
                draw(axes, curve, curves[curve])
            figure.savefig(IMAGES / f"{name}.svg", transparent=True, metadata={"Date": None})
            plt.close(figure)


def train(name: str) -> Mapping[str, list[tuple[int, float]]]:
    """Trains an example as `eventloop fit` does without plugins, and returns what was logged."""
    sys.path.insert(0, str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    make: Callable[[], Task] = module.task
    numbers = Numbers()
    with Trainer(make(), callbacks=[numbers], autoload=False) as trainer:
        trainer.fit()
    return numbers.curves


def draw(axes: Axes, title: str, points: list[tuple[int, float]]) -> None:
    """Draws one curve over the batches."""
    batches, values = zip(*points, strict=True)
    few: dict[str, Any] = {"marker": "o", "markersize": 3} if len(points) < 40 else {}
    axes.plot(batches, values, color="#5c6bc0", linewidth=1.4, **few)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("batch", fontsize=8)
    axes.tick_params(labelsize=8)


if __name__ == "__main__":
    main()
