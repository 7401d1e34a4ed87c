"""The first batches of a data loader, as a data loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


class FirstBatches:
    """Gives the first batches of a data loader each time it is gone through.

    Args:
        dataloader: an iterable of batches.
        limit: how many at most.
        num_batches: how many there are; None where nobody knows.
    """

    def __init__(self, dataloader: Any, limit: int, num_batches: int | None) -> None:
        self.dataloader = dataloader
        self.limit = limit
        self.num_batches = None if num_batches is None else min(limit, num_batches)

    @property
    def sampler(self) -> Any:
        """The data loader's sampler, which is told the epoch; None where it has none."""
        return getattr(self.dataloader, "sampler", None)

    @property
    def batch_sampler(self) -> Any:
        """The data loader's batch sampler, which is told the epoch; None where it has none."""
        return getattr(self.dataloader, "batch_sampler", None)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.dataloader), self.limit)
