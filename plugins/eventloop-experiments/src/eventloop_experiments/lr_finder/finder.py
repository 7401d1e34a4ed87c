"""The plugin added to the short run: sets the learning rate, and records the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop import hookimpl
from eventloop_experiments.lr_finder.curve import Curve

if TYPE_CHECKING:
    from typing import Literal

    from eventloop import State


class LrFinder:
    """Raises the learning rate from batch to batch, and writes rates and losses to a file.

    `eventloop lr-finder` adds it to its run. Parameter groups keep the ratios between their rates.

    Args:
        low: the first learning rate.
        high: the last learning rate.
        steps: number of batches.
        out: path of a JSON file.
    """

    role = "algorithm"

    def __init__(self, *, low: float, high: float, steps: int, out: Path) -> None:
        self.low = low
        self.high = high
        self.steps = steps
        self.out = Path(out)
        self._curve = Curve(low, high, steps)
        self._ratios: dict[str, list[float]] = {}

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Stores each group's learning rate relative to the largest."""
        rates = {
            name: [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]
            for name, optimizer in state.optimizers.items()
        }
        largest = max((max(group_rates) for group_rates in rates.values()), default=0.0)
        self._ratios = {
            name: [rate / largest if largest else 1.0 for rate in group_rates]
            for name, group_rates in rates.items()
        }

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Sets the rate of this batch, whatever a schedule has set."""
        rate = self._curve.rate(state.clock.batch)
        for name, ratios in self._ratios.items():
            groups = state.optimizers[name].param_groups
            for group, ratio in zip(groups, ratios, strict=True):
                group["lr"] = rate * ratio

    @hookimpl
    def scheduler_step(self, state: State, interval: Literal["ba", "ep"]) -> bool:
        """Skips the schedulers, which would overwrite the learning rate."""
        return True

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Records the loss; stops when it has exploded. Synchronizes with the device: the run is short."""
        if state.loss is None:
            return
        (loss, *_) = state.all_gather(float(state.loss))
        if self._curve.add(self._curve.rate(state.clock.batch - 1), loss):
            state.request_stop("lr-finder: the loss has exploded")

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Writes the curve on rank 0; it is the same on all ranks."""
        if state.rank:
            return
        content = {"rates": self._curve.rates, "losses": self._curve.losses}
        self.out.write_text(json.dumps(content), encoding="ascii")
