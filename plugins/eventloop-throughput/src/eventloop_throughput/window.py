"""A sliding window over the latest batches."""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple


class Amounts(NamedTuple):
    """Times and counts of one batch, or of several together.

    Args:
        seconds: from asking for the batch to its end.
        wait_s: of these, until the batch was there.
        batches: how many batches.
        samples: over all ranks.
        tokens: over all ranks; 0 if they aren't counted.
        flops: floating-point operations of this rank.
    """

    seconds: float
    wait_s: float
    batches: int
    samples: int
    tokens: int
    flops: float


class Window:
    """Sums times and counts of the latest batches.

    The first batch of all, which waits for workers, compilation and caches, is left out: it would
    slow the window for as long as it lies in it.

    Args:
        num_batches: how many of them, at most.

    Raises:
        ValueError: `num_batches` is less than 1.
    """

    def __init__(self, num_batches: int) -> None:
        if num_batches < 1:
            raise ValueError(f"a window of {num_batches} batches has nothing in it; give 1 or more")
        # Sums since the beginning: the window's are the difference of the last and the first.
        self._sums: deque[Amounts] = deque(maxlen=num_batches + 1)

    def add(self, batch: Amounts) -> None:
        """Adds the next batch; the oldest one drops out."""
        if self._sums:
            self._sums.append(Amounts._make(map(operator.add, self._sums[-1], batch)))
        else:
            self._sums.append(Amounts(0.0, 0.0, 0, 0, 0, 0.0))

    def total(self) -> Amounts | None:
        """Returns the sums over the window; None before the second batch."""
        if len(self._sums) < 2:
            return None
        return Amounts._make(map(operator.sub, self._sums[-1], self._sums[0]))
