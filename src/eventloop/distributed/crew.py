"""What writes a checkpoint: one rank alone, or a thread of each, which work step by step together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Crew(Protocol):
    """Those who write a checkpoint together, as one of them sees them."""

    rank: int
    world_size: int

    def run(self, step: Callable[[], T]) -> list[T]:
        """Runs a step on every rank, and waits until all have done it.

        Returns:
            The results on rank 0, in order of the ranks; [] on others.

        Raises:
            BaseException: what the step raised here, or a CheckpointError with what it raised on
                another rank: every rank raises if one does.
        """

    def first(self, value: T) -> T:
        """Returns what rank 0 gave, on every rank."""


class OneRank:
    """One rank, which writes all of it."""

    rank = 0
    world_size = 1

    def run(self, step: Callable[[], T]) -> list[T]:
        return [step()]

    def first(self, value: T) -> T:
        return value


ALONE: Crew = OneRank()
