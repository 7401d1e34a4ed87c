"""The processes that train together, as one of them sees them.

The classes here are those of one process; `data_parallel` derives those of several from them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

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
    from eventloop.signals import StopReason
    from eventloop.state import State
    from eventloop.training.numbers import OverRanks

Weight = float | Tensor
CountBatch = Callable[["State", Any], "Count"]
# Samples and tokens of a batch over all ranks, and the seconds that it took on rank 0.
Agreed = tuple[int, int, float]


class LossWeights:
    """What each microbatch contributes to the mean over the global batch: here, a batch in one piece.

    Attributes:
        each: what each weighs; None for a batch in one piece.
    """

    each: Sequence[Weight] | None = None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        """Returns the loss of microbatch `idx`, shape (), times its share."""
        return loss


WHOLE = LossWeights()


class Parts(LossWeights):
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


class Exchange:
    """How a batch's counts and the requests of single ranks become known to all: here, in one process."""

    def __init__(self) -> None:
        self._since = 0.0

    def request_stop(self, state: State, reason: StopReason) -> None:
        """Asks for the end of the run; the first reason is kept."""
        state.stop_reason = state.stop_reason or reason

    def request_checkpoint(self, state: State) -> None:
        """Asks for a checkpoint."""
        state.checkpoint_requested = True

    def start_fit(self) -> None:
        """Starts the timer; forgets what was asked before."""
        self._since = time.perf_counter()

    def start(self, state: State) -> None:
        """Sends the other ranks this batch's counts, without waiting for them."""

    def end(self, state: State) -> Agreed:
        """Returns the counts of all ranks, and grants what one of them asked for."""
        since, self._since = self._since, time.perf_counter()
        return state.count.samples, state.count.tokens, self._since - since

    def settle(self, state: State) -> None:
        """Grants what one of them has asked for so far; collective: every rank must call it."""


class Processes:
    """The processes that train together, as one of them sees them: here, one alone."""

    rank = 0
    local_rank = 0
    world_size = 1

    def __init__(self) -> None:
        self.exchange = Exchange()

    def hooks(self, settings: Settings) -> tuple[Feature, ...]:
        """Returns the core's plugins that training in these processes needs."""
        return ()

    def wrap(self, state: State) -> nn.Module:
        """Returns what a forward pass with gradients calls, which averages them over the ranks."""
        return state.model

    def loss_weights(
        self, state: State, microbatches: Sequence[Any], count_batch: CountBatch
    ) -> LossWeights:
        """Returns the microbatches' shares of the mean over the batch of all ranks.

        Args:
            count_batch: returns what a microbatch counts for; called only if that matters.
        """
        if state.num_microbatches == 1:
            return WHOLE
        weights = weights_of(state, microbatches, count_batch)
        total = total_weight(weights)
        return Parts(weights, lambda: total)

    def average(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        """Averages the gradients of these optimizers' parameters over the ranks.

        For gradients that the wrapped model's backward didn't exchange.
        """

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a tensor over the ranks; in one process, the tensor itself."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Returns this value of every rank, in order; every rank waits for the others."""
        return [value]

    def gather(self, value: Any) -> list[Any]:
        """Returns this value of every rank on rank 0, in order; [] on others, which get nothing sent."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """Returns the value of rank 0, which doesn't wait for the others."""
        return value

    def count_true(self, answer: bool) -> int:
        """Returns how many ranks say yes; every rank waits for the others."""
        return int(answer)

    def are_same(self, value: Any) -> bool:
        """Whether all ranks have the same value; of constant size, every rank waits for the others."""
        return True

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
        return None

    def watched(self) -> AbstractContextManager[None]:
        """Returns what ends this process if another one fails meanwhile."""
        return nullcontext()

    def crew(self) -> Crew:
        """Returns what threads of the ranks work together with; collective: every rank must call it."""
        return ALONE


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
        if not total.ndim if isinstance(total, Tensor) else total > 0:
            return total
    except TypeError:
        pass
    raise TaskError(
        f"the loss weights of {len(weights)} microbatches have no mean: {weights!r}",
        fix="let Task(loss_weight=...) give numbers or tensors of shape (), not all 0",
    )
