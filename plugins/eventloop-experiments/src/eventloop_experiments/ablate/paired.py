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
        low, high: bounds of the confidence interval, by Student's t; None for a single pair.
        num_seeds: number of pairs.
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int

    @property
    def leaves_zero_out(self) -> bool:
        """Whether the interval excludes zero."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Difference | None:
    """Compares values seed by seed, which cancels the seed's effect on both.

    Args:
        values, base: values by seed; seeds that either lacks are ignored.

    Returns:
        The mean of `values - base`; None if they share no seed.
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
    """Returns the sample standard deviation of at least two values; NaN if any isn't finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
