"""Detects a loss that isn't finite, without waiting for the device, and stops the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eventloop.clock import Counts, moment_of
from eventloop.errors import NonFiniteError
from eventloop.hook_markers import hookimpl
from eventloop.training.logged_numbers import HostCopy
from eventloop.training.sharded_tensors import local
from eventloop.training.weight_checks import EVERY, WeightWatch

if TYPE_CHECKING:
    from eventloop.config.settings import Settings
    from eventloop.distributed.processes import Processes
    from eventloop.state import State
    from eventloop.training.precision import Precision
    from eventloop.training.running_means import EpochLoss

AT_A_TIME = 10  # losses per copy to the host
Losses = list[tuple[Counts, Tensor]]
Norms = list[tuple[int, Tensor]]
_Copied = tuple[Losses, Norms, HostCopy]


class BadBatch(NamedTuple):
    """The first batch with a value that isn't finite on a rank.

    Attributes:
        batch: the number of the batch that caused it, as far as known; the first is 1.
        description: the value that isn't finite, for the message.
        facts: further lines of the message, by title.
    """

    batch: int
    description: str
    facts: dict[str, str]


def watches_of(
    settings: Settings, latest: EpochLoss, processes: Processes, precision: Precision
) -> tuple[object, ...]:
    """Returns the core's plugins that watch the losses and weights of a run."""
    weights = WeightWatch(processes, stops=settings.on_bad_loss == "raise")
    if settings.on_bad_loss == "ignore":
        return (QuietWatch(weights),)
    losses = LossWatch(latest, weights)
    # With fp16, overflowing gradients are expected: the scaler skips their steps.
    has_norms = settings.clip_norm is not None and precision.name != "fp16"
    return (losses, NormWatch(losses)) if has_norms else (losses,)


class LossWatch:
    """Stops a run whose loss or weights aren't finite: the core plugin for `on_bad_loss="raise"`.

    Losses stay on the device, are copied to the host ten at a time, and are checked once they have
    arrived. If a rank finds a bad loss, all ranks stop together and report the earliest bad batch of
    any rank.

    Args:
        latest: provides the loss of each batch.
        weights: checks the weights.
    """

    __slots__ = ("_bad", "_copies", "_latest", "_norms", "_pending", "_weights")

    def __init__(self, latest: EpochLoss, weights: WeightWatch) -> None:
        self._latest = latest
        self._weights = weights
        self._forget()

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._forget()
        self._weights.start_fit(state)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        loss = self._latest.latest
        pending = self._pending
        counts = state.clock._now
        if loss is not None:
            # If a plugin's update left no loss, the previous loss is checked again, which is harmless.
            pending.append((counts, loss))
        if len(pending) == AT_A_TIME:
            self._start_copy()
        while self._copies and self._copies[0][2].is_ready():
            self._check_copy(state)
        if state.stop_reason is not None and state.stop_reason.kind == "loss":  # all ranks know
            self._check_all(state)
        if not counts[1] % EVERY:
            self._weights.look(state)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state: State) -> Generator[None, Any, Any]:
        self._check_all(state)
        return (yield)

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._check_all(state)
        self._weights.end_fit(state)

    def keep_norm(self, batch: int, norm: Tensor) -> None:
        """Stores the gradient norm of a batch; it shows whether this batch or the next caused a bad loss.

        Args:
            batch: the number of the batch; the first is 1.
            norm: shape (), on the device.
        """
        self._norms.append((batch, norm))

    def _forget(self) -> None:
        self._pending: Losses = []
        self._norms: Norms = []
        self._copies: deque[_Copied] = deque()
        self._bad: tuple[Counts, float] | None = None

    def _check_all(self, state: State) -> None:
        """Checks all pending losses; raises NonFiniteError on every rank if any rank has a bad loss."""
        self._start_copy()
        while self._copies:
            self._check_copy(state)
        if not state.count_true(self._bad is not None):
            return
        local_batch = None if self._bad is None else self._bad_batch(state, *self._bad)
        bad_batches = [
            (bad_batch, rank)
            for rank, bad_batch in enumerate(state.all_gather(local_batch))
            if bad_batch is not None
        ]
        earliest, rank = min(bad_batches, key=lambda pair: (pair[0].batch, pair[1]))
        labels = [
            state.layout.label(rank)
            for bad_batch, rank in bad_batches
            if bad_batch.batch == earliest.batch
        ]
        facts = dict(earliest.facts)
        if len(labels) > 1:
            facts = {"ranks": f"{', '.join(labels)} alike", **facts}
        subject = f"rank {state.layout.label(rank)}: " if state.world_size > 1 else ""
        raise NonFiniteError(f"{subject}{earliest.description}", **facts)

    def _start_copy(self) -> None:
        if self._pending:
            copy = HostCopy([number for _, number in [*self._pending, *self._norms]])
            self._copies.append((self._pending, self._norms, copy))
            self._pending = []
            self._norms = []

    def _check_copy(self, state: State) -> None:
        losses, norms, copy = self._copies.popleft()
        numbers = copy.numbers()
        if math.isfinite(sum(numbers)):
            return  # one check of the sum replaces ten checks
        for (batch, _), norm in zip(norms, numbers[len(losses) :], strict=True):
            if not math.isfinite(norm):
                self._weights.bad_gradients.add(batch)
        if self._bad is not None:
            return
        for (counts, _), number in zip(losses, numbers, strict=False):
            if not math.isfinite(number):
                self._bad = counts, number
                state.request_stop("a loss isn't finite", "loss")
                return

    def _bad_batch(self, state: State, counts: Counts, loss: float) -> BadBatch:
        """Describes the batch of a bad loss; waits for the device."""
        moment = moment_of(counts)
        params = list(state.model.named_parameters())
        not_finite = (name for name, param in params if not local(param).isfinite().all())
        previous_batch = moment.batch - 1
        bad_param = next(not_finite, None)
        description_of_params = (
            "all are finite: the loss or the data is to blame, or the step was skipped"
        )
        if bad_param is not None:
            description_of_params = f"{bad_param!r} is the first that isn't finite"
        facts = {
            "found": f"at batch {state.clock.batch}; all steps since batch {moment.batch} are lost",
            "parameters": description_of_params,
        }
        fix = "check the inputs and targets of that batch, and the loss; "
        if bad_param is not None and previous_batch:
            # Only an earlier step can have made weights infinite; there is none before batch 1.
            fix += "if these are finite, lower the learning rate or set clip_norm=1.0; "
        fix += "with "
        if state.precision.name == "fp16":
            facts["fp16"] = _range_of_fp16(params)
            fix = f"set precision to bf16 or fp32, which have a larger range; or {fix}"
        description = f"the loss is {loss} at epoch {moment.epoch + 1}, batch {moment.batch}"
        batch = moment.batch
        if previous_batch in self._weights.bad_gradients:
            description = (
                f"the gradients aren't finite at batch {previous_batch}, nor is the loss after: "
                f"{description}"
            )
            batch = previous_batch
        elif bad_param is not None and previous_batch and state.settings.clip_norm is None:
            facts["suspects"] = (
                f"batch {moment.batch}, or the gradients of batch {previous_batch}, whose loss was "
                "finite; set clip_norm to find out which"
            )
        facts["fix"] = f'{fix}on_bad_loss="ignore" the run continues'
        return BadBatch(batch, description, facts)


class NormWatch:
    """Passes the gradient norms of clipping to a `LossWatch`: a core plugin if `clip_norm` is set.

    Args:
        losses: stores the norms.
    """

    __slots__ = ("_losses",)

    def __init__(self, losses: LossWatch) -> None:
        self._losses = losses

    @hookimpl(wrapper=True)
    def clip_gradients(
        self, state: State, optimizers: Mapping[str, Optimizer]
    ) -> Generator[None, dict[str, Tensor], dict[str, Tensor]]:
        numbers = yield
        norm = numbers.get("grad_norm")
        if norm is not None:
            self._losses.keep_norm(state.clock._now[1] + 1, local(norm))
        return numbers


class QuietWatch:
    """Warns about weights that aren't finite: the core plugin for `on_bad_loss="ignore"`.

    Args:
        weights: checks the weights.
    """

    __slots__ = ("_weights",)

    def __init__(self, weights: WeightWatch) -> None:
        self._weights = weights

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._weights.start_fit(state)

    @hookimpl
    def batch_checkpoint(self, state: State) -> None:
        if not state.clock._now[1] % EVERY:
            self._weights.look(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._weights.end_fit(state)


def _range_of_fp16(params: Iterable[tuple[str, nn.Parameter]]) -> str:
    """Compares the largest parameter with the largest fp16 number; waits for the device."""
    shards = ((local(param), name) for name, param in params)
    largest_entries = [(shard.abs().max().item(), name) for shard, name in shards if shard.numel()]
    largest, name = max(largest_entries, default=(0.0, ""))
    limit = torch.finfo(torch.float16).max
    if not largest <= limit:  # also true for NaN
        return (
            f"its limit is {limit:,.0f}, and {name!r} reaches {largest:.3g}: the weights exploded"
        )
    return (
        f"its limit is {limit:,.0f}; the weights reach only {largest:.3g}, in {name!r}, so an output, "
        "the loss or the data overflowed"
    )
