"""The threads that write a checkpoint: of a single rank, or of every rank in lockstep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from eventloop.errors import CheckpointError

T = TypeVar("T")


class Crew:
    """The ranks that write a checkpoint together; this class is for a single rank."""

    rank = 0
    world_size = 1

    def run(self, step: Callable[[], T]) -> list[T]:
        """Runs a step on every rank; returns the results in order of ranks on rank 0, [] on other ranks.

        If the step raises on a rank, this method raises on all ranks: the exception of this rank, or a
        CheckpointError with the text of another rank's exception.
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
        import torch.distributed as dist  # takes seconds; commands that only list checkpoints don't need it

        self._dist = dist
        self._group = group
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def run(self, step: Callable[[], T]) -> list[T]:
        raised: BaseException | None = None
        result: T | None = None
        try:
            result = step()
        except BaseException as error:  # noqa: BLE001  raised below, when all ranks know of it
            raised = error
        problem_of_rank = None if raised is None else f"rank {self.rank}: {raised}"
        outcomes = self.gather((result, problem_of_rank))
        problems = [problem for _, problem in outcomes if problem is not None]
        first_problem = self.first(problems[0] if problems else None)
        if raised is not None:
            raise raised
        if first_problem is not None:
            raise CheckpointError(first_problem)
        return [result for result, _ in outcomes]

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks on rank 0, and [] on others."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def first(self, value: T) -> T:
        values = [value]
        self._dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]
