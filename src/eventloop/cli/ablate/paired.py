"""Differences between runs of the same seeds, with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    half = student_t(len(pairs) - 1) * deviation(pairs) / math.sqrt(len(pairs))
    return Difference(mean, mean - half, mean + half, len(pairs))


def deviation(values: Sequence[float]) -> float:
    """Gives the standard deviation of a sample of two or more; NaN where one isn't finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def student_t(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Gives the t that |T| stays below with this probability, for T of Student's distribution.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4, inverted by bisection.
    """
    low, high = 0.0, 1.0
    while _probability(high, degrees) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if _probability(middle, degrees) < confidence:
            low = middle
        else:
            high = middle
    return high


def _probability(t: float, degrees: int) -> float:
    """Gives the probability that |T| is at most t."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + is_odd, degrees - 1, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
