"""The loss over a growing learning rate, and the rate that it proposes.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, arXiv:1506.01186,
section 3.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

_EXPLODED = 4.0


class Proposal(NamedTuple):
    """Learning rates read off a curve.

    Args:
        steepest: rate at which the smoothed loss falls fastest, over the logarithm of the rate.
        lowest: rate at which the smoothed loss is lowest.
    """

    steepest: float
    lowest: float


@dataclass
class Curve:
    """Losses as the learning rate grows from `low` to `high`, evenly in its logarithm.

    Args:
        smoothing: weight of the previous smoothed loss at each step, in [0, 1).
    """

    low: float
    high: float
    num_steps: int
    smoothing: float = 0.9
    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step; steps count from 0."""
        return float(self.low * (self.high / self.low) ** (step / max(1, self.num_steps - 1)))

    def add(self, rate: float, loss: float) -> bool:
        """Adds the loss of a step; returns True if the loss has exploded and the run can stop."""
        self.rates.append(rate)
        self.losses.append(loss)
        smoothed = self.smoothed()
        lowest = min(smoothed)
        # A multiple of a negative loss would be lower still, so the rise is compared with the fall before.
        size = lowest if lowest > 0 else max(-lowest, smoothed[0] - lowest)
        return not math.isfinite(loss) or smoothed[-1] - lowest > (_EXPLODED - 1) * size

    def smoothed(self) -> list[float]:
        """Returns the moving average of the losses, with bias correction at its start."""
        mean = 0.0
        smoothed = []
        for step, loss in enumerate(self.losses, 1):
            mean = self.smoothing * mean + (1 - self.smoothing) * loss
            smoothed.append(mean / (1 - self.smoothing**step))
        return smoothed

    def proposal(self) -> Proposal | None:
        """Returns the proposed rates; None if the loss never falls."""
        pairs = [
            (rate, loss)
            for rate, loss in zip(self.rates, self.smoothed(), strict=True)
            if math.isfinite(loss)
        ]
        lowest = min(range(len(pairs)), key=lambda idx: pairs[idx][1], default=0)
        if lowest < 2:
            return None
        slopes = [pairs[idx + 1][1] - pairs[idx - 1][1] for idx in range(1, lowest)]
        steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
        return Proposal(pairs[steepest][0], pairs[lowest][0])
