"""The processes that train together, as one of them sees them.

One object stands for one process, `DataParallel` for several; both have the same methods. So do their
exchanges, through which counts of a batch and requests of single ranks become known to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.distributed.crew import ALONE
from eventloop.errors import TaskError

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.data.batches import Count
    from eventloop.distributed.crew import Crew
    from eventloop.run.runtime import Feature
    from eventloop.state import State
    from eventloop.training.numbers import OverRanks

Weight = float | Tensor
CountBatch = Callable[["State", Any], "Count"]
# Samples and tokens of a batch over all ranks, and the seconds that it took on rank 0.
Agreed = tuple[int, int, float]


class LossWeights(Protocol):
    """What each microbatch contributes to the mean over the global batch.

    Attributes:
        each: what each weighs; None for a batch in one piece.
    """

    each: Sequence[Weight] | None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        """Returns the loss of microbatch `idx`, shape (), times its share."""


class Processes(Protocol):
    """The processes that train together, as one of them sees them."""

    rank: int
    local_rank: int
    world_size: int
    exchange: Exchange

    def hooks(self, settings: Settings) -> tuple[Feature, ...]:
        """Returns the core's plugins that training in these processes needs."""

    def wrap(self, state: State) -> nn.Module:
        """Returns what a forward pass with gradients calls, which averages them over the ranks."""

    def loss_weights(
        self, state: State, microbatches: Sequence[Any], count_batch: CountBatch
    ) -> LossWeights:
        """Returns the microbatches' shares of the mean over the batch of all ranks.

        Args:
            count_batch: returns what a microbatch counts for; called only if that matters.
        """

    def average(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        """Averages the gradients of these optimizers' parameters over the ranks.

        For gradients that the wrapped model's backward didn't exchange.
        """

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a tensor over the ranks; in one process, the tensor itself."""

    def all_gather(self, value: Any) -> list[Any]:
        """Returns this value of every rank, in order; every rank waits for the others."""

    def gather(self, value: Any) -> list[Any]:
        """Returns this value of every rank on rank 0, in order; [] on others, which get nothing sent."""

    def from_first(self, value: Any) -> Any:
        """Returns the value of rank 0, which doesn't wait for the others."""

    def count_true(self, answer: bool) -> int:
        """Returns how many ranks say yes; every rank waits for the others."""

    def are_same(self, value: Any) -> bool:
        """Whether all ranks have the same value; of constant size, every rank waits for the others."""

    def compare_weights(self, state: State, sums: Mapping[str, float], when: str) -> None:
        """Makes sure that ranks which should have the same weights have them.

        Args:
            sums: of each parameter that is trained, by name.
            when: since when something may differ, for the message.

        Raises:
            EventloopError: they have drifted apart.
        """

    def reducer(self, device: torch.device) -> OverRanks | None:
        """Returns what reduces logged numbers over the ranks; None where there is one."""

    def watched(self) -> AbstractContextManager[None]:
        """Returns what ends this process if another one fails meanwhile."""

    def crew(self) -> Crew:
        """Returns what threads of the ranks work together with; collective: every rank must call it."""


class SingleProcess:
    """Training in one process."""

    rank = 0
    local_rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.exchange: Exchange = Alone()

    def hooks(self, settings: Settings) -> tuple[Feature, ...]:
        return ()

    def wrap(self, state: State) -> nn.Module:
        return state.model

    def loss_weights(
        self, state: State, microbatches: Sequence[Any], count_batch: CountBatch
    ) -> LossWeights:
        """Returns what each weighs of what all weigh; a batch in one piece is its own mean."""
        if state.num_microbatches == 1:
            return WHOLE
        weights = weights_of(state, microbatches, count_batch)
        total = total_weight(weights)
        return Parts(weights, lambda: total)

    def average(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        """Leaves the gradients as they are."""

    def mean(self, value: Tensor) -> Tensor:
        return value

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def from_first(self, value: Any) -> Any:
        return value

    def count_true(self, answer: bool) -> int:
        return int(answer)

    def are_same(self, value: Any) -> bool:
        return True

    def compare_weights(self, state: State, sums: Mapping[str, float], when: str) -> None:
        """Finds nothing to compare."""

    def reducer(self, device: torch.device) -> OverRanks | None:
        return None

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def crew(self) -> Crew:
        return ALONE


class Whole:
    """A batch in one piece: its loss is the mean."""

    each: Sequence[Weight] | None = None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        return loss


WHOLE = Whole()


class Parts:
    """Microbatches, each with its weight in the mean.

    Args:
        each: what each weighs, numbers or tensors of shape ().
        total: gives what they all weigh; asked when the first loss is there.
    """

    def __init__(self, each: Sequence[Weight], total: Callable[[], Weight]) -> None:
        self.each: Sequence[Weight] | None = each
        self._weights = each
        self._total = total
        self._known: Weight | None = None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        """Returns loss times weight / total; 0 for a microbatch that weighs nothing.

        A loss that is a mean over nothing is NaN, which would stay NaN times 0.
        """
        if self._known is None:
            self._known = self._total()
        weight = self._weights[idx]
        scaled = loss * (weight / self._known)
        return torch.where(weight == 0, 0.0, scaled) if isinstance(weight, Tensor) else scaled


def weights_of(state: State, microbatches: Sequence[Any], count_batch: CountBatch) -> list[Weight]:
    """Returns the weight of each microbatch, with it at hand in the State."""
    weights = []
    for microbatch in microbatches:
        state.microbatch = microbatch
        weights.append(count_batch(state, microbatch).weight)
    return weights


def total_weight(weights: Sequence[Weight]) -> Weight:
    """Adds weights up.

    Raises:
        TaskError: they aren't numbers or tensors of shape (), or are all 0, as far as the host
            can tell.
    """
    try:
        total = sum(weights)
        bad = isinstance(total, Tensor) and total.ndim > 0
        if not bad and (isinstance(total, Tensor) or total > 0):
            return total
    except TypeError:
        pass
    raise TaskError(
        f"the loss weights of {len(weights)} microbatches have no mean: {weights!r}",
        fix="let Task(loss_weight=...) give numbers or tensors of shape (), not all 0",
    )


class Exchange(Protocol):
    """How a batch's counts and the requests of single ranks become known to all."""

    def request_stop(self, state: State, reason: str) -> None:
        """Asks for the end of the run; the first reason is kept."""

    def request_checkpoint(self, state: State) -> None:
        """Asks for a checkpoint."""

    def start_fit(self) -> None:
        """Begins to take the time; forgets what was asked before."""

    def start(self, state: State) -> None:
        """Sends the other ranks this batch's facts, without waiting for them."""

    def end(self, state: State) -> Agreed:
        """Returns what all ranks told, and grants what one of them asked for."""

    def end_fit(self, state: State) -> None:
        """Grants what one of them has asked for since the last batch."""


class Alone:
    """The exchange of one process, which grants at once what is asked."""

    def __init__(self) -> None:
        self._since = 0.0

    def request_stop(self, state: State, reason: str) -> None:
        state.stop_reason = state.stop_reason or reason

    def request_checkpoint(self, state: State) -> None:
        state.checkpoint_requested = True

    def start_fit(self) -> None:
        self._since = time.perf_counter()

    def start(self, state: State) -> None:
        """Does nothing: there are no other ranks."""

    def end(self, state: State) -> Agreed:
        since, self._since = self._since, time.perf_counter()
        return state.count.samples, state.count.tokens, self._since - since

    def end_fit(self, state: State) -> None:
        """Does nothing: all that was asked is granted."""
