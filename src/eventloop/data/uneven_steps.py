"""Batches that ranks share whose number doesn't divide them: some ranks take a sample more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from torch.utils.data import Sampler

from eventloop.data.sharding import RankPart


class UnevenSteps(Sampler[list[Any]]):
    """A rank's batches of steps that stay as large as they were, whatever the number of ranks.

    Args:
        sampler: yields the samples of all ranks, which draw them alike.
        rank, world_size: this one, of how many.
        step_size: how many samples all ranks take a step; at least one each.
        drop_last: whether a last step of fewer samples is left out. It is, too, where it has fewer
            than there are ranks and the sampler drops what doesn't divide; else it repeats some.
    """

    def __init__(
        self, sampler: RankPart, rank: int, world_size: int, step_size: int, drop_last: bool
    ) -> None:
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._step_size = step_size
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Returns how many steps there are, on every rank alike."""
        num_whole, rest = divmod(len(self.sampler), self._step_size)
        return num_whole + self._takes(rest)

    def __iter__(self) -> Iterator[list[Any]]:
        """Draws the samples of all and yields this rank's part of each step."""
        samples = iter(self.sampler)
        while step := list(islice(samples, self._step_size)):
            if len(step) < self._step_size and not self._takes(len(step)):
                return
            step = list(islice(cycle(step), max(len(step), self._world_size)))
            yield step[self._rank :: self._world_size]

    def _takes(self, rest: int) -> bool:
        """Returns whether a last step of so few samples is made."""
        is_too_small = rest < self._world_size and self.sampler.even == "drop"
        return rest > 0 and not self._drop_last and not is_too_small
