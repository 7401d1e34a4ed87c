"""The curve as a picture."""

from __future__ import annotations

from pathlib import Path

from eventloop_experiments.lr_finder.curve import Curve, Proposal


def draw(curve: Curve, proposal: Proposal | None, path: Path) -> None:
    """Writes a PNG: losses as points, their average as a line, the proposed rate as a vertical line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    smoothed = curve.smoothed()
    axes.plot(curve.rates, curve.losses, ".", color="tab:blue", alpha=0.3, label="loss")
    axes.plot(curve.rates, smoothed, color="tab:blue", label="average")
    if proposal is not None:
        label = f"falls fastest at {proposal.steepest:.2g}"
        axes.axvline(proposal.steepest, color="tab:red", label=label)
    finite = [loss for loss in smoothed if loss == loss]  # NaN isn't equal to itself
    if finite:
        low = min(finite)
        high = max(finite[: max(1, len(finite) // 2)])
        axes.set_ylim(low - 0.1 * abs(high - low) - 1e-9, high + 0.5 * abs(high - low) + 1e-9)
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
