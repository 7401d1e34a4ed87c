"""The processes of a run, from the view of one process.

The classes here are for a run in a single process; `data_parallel` has the classes for several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.distributed.checkpoint_crew import ALONE
from eventloop.errors import TaskError
from eventloop.mesh import Layout

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from eventloop.config.settings import Settings
    from eventloop.distributed.checkpoint_crew import Crew
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.signals import StopReason
    from eventloop.state import State
    from eventloop.training.logged_numbers import OverRanks

Weight = float | Tensor
WeighMicrobatch = Callable[["State"], Weight]
# Samples and tokens of a batch over all ranks, and the seconds that the batch took on rank 0.
Agreed = tuple[int, int, float]


class LossWeights:
    """The weight of each microbatch in the mean over the global batch; None for a whole batch."""

    each: Sequence[Weight] | None = None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        """Returns the loss of microbatch `idx`, shape (), times its share of the batch."""
        return loss


WHOLE = LossWeights()


class Parts(LossWeights):
    """Microbatches with their weights, and a function for the total, called at the first loss."""

    def __init__(self, each: Sequence[Weight], total: Callable[[], Weight]) -> None:
        self.each: Sequence[Weight] | None = each
        self._weights = each
        self._total = total
        self._cached_total: Weight | None = None

    def scaled(self, loss: Tensor, idx: int) -> Tensor:
        """Returns loss * weight / total, shape (); 0 for a microbatch of weight 0.

        Such a microbatch has a loss of NaN, the mean of nothing, and NaN times 0 would be NaN.
        """
        if self._cached_total is None:
            self._cached_total = self._total()
        weight = self._weights[idx]
        total = self._cached_total
        if isinstance(weight, Tensor):
            # `where` selects without reading the weight on the host, which would wait for the device.
            share = torch.where(weight == 0, 0.0, weight / total)
            return torch.where(weight == 0, 0.0, loss * share)
        if weight:
            return loss * (weight / total)
        # Zero with a graph, so that `backward` works, and DDP sees gradients of all parameters.
        return torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)


class Exchange:
    """Exchanges a batch's counts and requests between ranks; this class is for a single process."""

    def __init__(self) -> None:
        self._since = 0.0

    def request_stop(self, state: State, reason: StopReason) -> None:
        """Requests the end of the run; the first reason is kept."""
        state.stop_reason = state.stop_reason or reason

    def request_checkpoint(self, state: State) -> None:
        """Requests a checkpoint."""
        state.checkpoint_requested = True

    def start_fit(self) -> None:
        """Starts the timer and clears earlier requests."""
        self._since = time.perf_counter()

    def start(self, state: State) -> None:
        """Sends the other ranks this batch's counts, without waiting for them."""

    def end(self, state: State) -> Agreed:
        """Returns the counts of all ranks, and grants requests of any rank."""
        since = self._since
        self._since = time.perf_counter()
        return state.count.samples, state.count.tokens, self._since - since

    def settle(self, state: State) -> None:
        """Grants pending requests of any rank. Collective: every rank must call it."""


class Processes:
    """The processes of a run, from the view of one process; this class is for a single process."""

    rank = 0
    local_rank = 0
    world_size = 1
    layout = Layout({"data": 1})
    data_rank = 0
    data_world_size = 1

    def __init__(self) -> None:
        self.exchange = Exchange()

    def arrange(self, layout: Layout, device: torch.device) -> None:
        """Arranges the ranks in the layout that `build_mesh` returned. Collective: every rank must call it."""

    def record_answers(self, active: ActivePlugins) -> None:
        """Records the answers to the loop's questions from now on, to compare them between ranks."""

    def hooks(self, settings: Settings) -> tuple[object, ...]:
        """Returns the core's plugins for training with these processes."""
        return ()

    def wrap(self, state: State) -> nn.Module:
        """Returns the model to call for training, which averages gradients over the ranks."""
        return state.model

    def loss_weights(
        self, state: State, microbatches: Sequence[Any], weigh: WeighMicrobatch
    ) -> LossWeights:
        """Returns the microbatches' weights in the mean over the batch of all ranks.

        Args:
            weigh: returns the weight of `state.microbatch`; called only if needed.
        """
        if state.num_microbatches == 1:
            return WHOLE
        weights = weights_of(state, microbatches, weigh)
        total = total_weight(weights)
        return Parts(weights, lambda: total)

    def average(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        """Averages the gradients of these optimizers' parameters over the ranks.

        For gradients that the wrapped model's backward pass hasn't averaged.
        """

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a tensor over the ranks; in one process, the tensor itself."""
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank, in order; every rank waits for the others."""
        return [value]

    def gather(self, value: Any) -> list[Any]:
        """Returns the value of every rank on rank 0, in order; [] on other ranks."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """Returns the value of rank 0; rank 0 doesn't wait for the others."""
        return value

    def count_true(self, answer: bool) -> int:
        """Returns the number of ranks whose answer is True; every rank waits for the others."""
        return int(answer)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks by dimension; None for a single process. The first access is collective."""
        return None

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same part of the model and different samples; None if these are all ranks."""
        return None

    def are_same(self, value: Any) -> bool:
        """Whether all ranks have the same value; every rank waits for the others.

        Ranks exchange only a digest, whatever the size of the value.
        """
        return True

    def compare_weights(self, state: State, sums: Mapping[str, float], when: str) -> None:
        """Checks that copies of a weight on several ranks are equal.

        Args:
            sums: the sum of each trained parameter, by name.
            when: since when the weights may differ, for the message.
        """

    def reducer(self, device: torch.device) -> OverRanks | None:
        """Returns a function that reduces logged numbers over the ranks; None for one rank."""
        return None

    def watched(self) -> AbstractContextManager[None]:
        """Returns a context in which this process is ended if another one fails."""
        return nullcontext()

    def crew(self) -> Crew:
        """Returns the crew for background threads. Collective: every rank must call it."""
        return ALONE


def weights_of(state: State, microbatches: Sequence[Any], weigh: WeighMicrobatch) -> list[Weight]:
    """Returns the weight of each microbatch, setting `state.microbatch` for each."""
    weights = []
    for microbatch in microbatches:
        state.microbatch = microbatch
        weights.append(weigh(state))
    return weights


def total_weight(weights: Sequence[Weight]) -> Weight:
    """Returns the sum of weights; raises TaskError if it isn't a positive number.

    The value of a tensor isn't checked, only its shape: reading it would wait for the device.
    """
    try:
        total = sum(weights)
        is_valid = total.ndim == 0 if isinstance(total, Tensor) else total > 0
        if is_valid:
            return total
    except TypeError:  # weights that aren't numbers
        pass
    raise TaskError(
        f"the loss weights of {len(weights)} microbatches have no mean: {weights!r}",
        fix="let Task(loss_weight=...) return numbers or tensors of shape (), not all 0",
    )
