"""The threads that write a checkpoint: of a single rank, or of every rank in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from eventloop.errors import CheckpointError

T = TypeVar("T")


class Crew:
    """The ranks that write a checkpoint together: here, a single rank."""

    rank = 0
    world_size = 1

    def run(self, step: Callable[[], T]) -> list[T]:
        """Runs a step on every rank; returns the results by rank on rank 0, and [] on others.

        If one rank raises, all do: what the step raised here, or a CheckpointError with what it
        raised on another rank.
        """
        return [step()]

    def first(self, value: T) -> T:
        """Returns the value of rank 0 on every rank."""
        return value


ALONE = Crew()


class CrewOfRanks(Crew):
    """A background thread of every rank; they work in lockstep.

    Args:
        group: a gloo group that nothing else uses.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist  # takes seconds, which listing checkpoints does without

        self._dist = dist
        self._group = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def run(self, step: Callable[[], T]) -> list[T]:
        own: BaseException | None = None
        result: T | None = None
        try:
            result = step()
        except BaseException as error:  # noqa: BLE001  raised below, when all know
            own = error
        outcomes = self.gather((result, None if own is None else f"rank {self.rank}: {own}"))
        problem = self.first(next((why for _, why in outcomes if why is not None), None))
        if own is not None:
            raise own
        if problem is not None:
            raise CheckpointError(problem)
        return [one for one, _ in outcomes]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on rank 0, and [] on others."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def first(self, value: T) -> T:
        values = [value]
        self._dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]
