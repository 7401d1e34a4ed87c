"""Differences between runs of the same seeds, with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import special

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences.

    Args:
        low, high: of its confidence interval, by Student's t; None for a single pair.
        num_seeds: how many pairs.
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int

    @property
    def leaves_zero_out(self) -> bool:
        """Whether the interval does."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compares values seed by seed: what a seed does to both falls out.

    Args:
        values, base: by seed; those that one of them lacks don't count.

    Returns:
        The mean of `values - base`; None where no seed is in both.
    """
    pairs = [value - base[seed] for seed, value in values.items() if seed in base]
    if not pairs:
        return None
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return Difference(mean, None, None, 1)
    quantile = float(special.stdtrit(len(pairs) - 1, 0.5 + CONFIDENCE / 2))
    half = quantile * deviation(pairs) / math.sqrt(len(pairs))
    return Difference(mean, mean - half, mean + half, len(pairs))


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation of a sample of two or more; NaN where one isn't finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
