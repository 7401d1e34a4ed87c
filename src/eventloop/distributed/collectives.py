"""What ranks send each other: counts and requests of a batch, gradients, statistics, weights and buffers."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private, but what all batch norms are, those over several ranks included (torch 2.13).
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from eventloop.devices import kind_of
from eventloop.distributed.answers import Difference, answered_differently, answers_of
from eventloop.distributed.consistency import DECIDED_ALONE
from eventloop.distributed.processes import Exchange
from eventloop.distributed.rank_store import POLL_S, bulletin, wait_until
from eventloop.distributed.thread_location import wait_for
from eventloop.errors import TaskError
from eventloop.training.optimizers import params_of
from eventloop.training.sharded_tensors import local

if TYPE_CHECKING:
    from eventloop.distributed.data_parallel import DataParallel
    from eventloop.distributed.processes import Agreed
    from eventloop.signals import StopReason
    from eventloop.state import State

# As many as torch's DistributedDataParallel sends in one go.
_BUCKET_BYTES = 25 * 2**20
# Even batches between exchanges, and the seconds within which a signal is noticed, if no batch takes longer.
_EVERY = 16
_NOTICED_S = 0.25
_RECORDS_S = 4 * POLL_S


class ExchangeOfRanks(Exchange):
    """Exchanges counts and requests between ranks: an asynchronous sum on the host.

    If batches can be uneven, each has one. Otherwise every `_EVERY`th batch has one, or more of
    them if batches are slow, so that a signal isn't delayed; rank 0's timings decide for all
    ranks.
    """

    def __init__(self, processes: DataParallel) -> None:
        self._processes = processes
        self._board = bulletin()
        self._answers = answers_of(os.getpid())
        self.start_fit()

    def start_fit(self) -> None:
        self._stop_reason: StopReason | None = None
        self._is_urgent = self._checkpoint = False
        self._work: Any = None
        self._interval = 1.0
        # Since the last exchange: batches, seconds on rank 0, and what the losses weighed.
        self._since = time.perf_counter()
        self._num_batches = 0
        self._seconds = 0.0
        self._weight = 0.0
        self._sent = 0.0
        self._answers.start_digest()
        self._sent_digest = 0

    def request_stop(self, state: State, reason: StopReason) -> None:
        self._stop_reason = self._stop_reason or reason
        self._is_urgent = self._is_urgent or reason.kind in ("signal", "loss")

    def request_checkpoint(self, state: State) -> None:
        self._checkpoint = True

    def weigh(self, weight: float) -> None:
        """Adds the weights of batches that should be the same on all ranks."""
        self._weight += weight

    def start(self, state: State) -> None:
        since = self._since
        self._since = time.perf_counter()
        self._seconds += (self._since - since) * (self._processes.rank == 0)
        self._num_batches += 1
        if self._board is not None:
            self._board.num_batches += 1
        # A plugin's request is granted at a batch that doesn't depend on the time.
        is_due = not state.even_batches or not (state.clock.batch + 1) % _EVERY
        if not is_due and self._num_batches < self._interval:
            return
        stops = self._is_urgent or (is_due and self._stop_reason is not None)
        self._sent = self._weight
        self._sent_digest = self._answers.digest
        counts = (state.count.samples, state.count.tokens, self._seconds, self._sent)
        # Read through the array, no operation of torch is needed to see the sums.
        requests = (float(stops), float(self._checkpoint))
        self._sums = array("d", (*counts, *requests, float(self._sent_digest)))
        sums = torch.frombuffer(self._sums, dtype=torch.float64)
        self._work = dist.all_reduce(sums, group=self._processes.host, async_op=True)

    def end(self, state: State) -> Agreed:
        processes = self._processes
        if self._work is None:
            return state.count.samples * processes.data_world_size, 0, 0.0
        wait_for(self._work)
        samples, tokens, seconds, weight, stops, checkpoints, digests = self._sums
        if digests != self._sent_digest * processes.world_size:
            raise self._answered_differently()
        if weight != self._sent * processes.world_size:
            raise _uneven(self._num_batches, self._sent, weight)
        if stops or checkpoints:
            self.settle(state)
        self._interval = _NOTICED_S * self._num_batches / seconds if seconds else 1.0
        self._weight -= self._sent
        self._work = None
        self._num_batches = 0
        self._seconds = 0.0
        num = processes.world_size // processes.data_world_size  # each of whom has counted the same
        return int(samples) // num, int(tokens) // num, seconds

    def _answered_differently(self) -> TaskError:
        """Returns the error that names the question, if the ranks' records in the store show it."""
        found: list[Difference] = []

        def look() -> bool:
            difference = self._board.difference() if self._board is not None else None
            found.extend([difference] if difference is not None else [])
            return bool(found)

        # Ranks rewrite their records twice a second.
        wait_until(look, _RECORDS_S if self._board is not None else 0.0)
        if not found:
            return TaskError(
                f"the ranks answered a question of the loop, should_skip_batch say, differently in the "
                f"last {self._num_batches} batches",
                fix=DECIDED_ALONE,
            )
        return answered_differently(found[0], self._answers, self._processes.layout)

    def settle(self, state: State) -> None:
        own = (self._stop_reason, self._checkpoint, self._weight)
        reasons, checkpoints, weights = zip(*self._processes.all_gather(own), strict=True)
        if any(one != self._weight for one in weights):
            raise _uneven(self._num_batches, self._weight, sum(weights))
        state.stop_reason = state.stop_reason or next(filter(None, reasons), None)
        if any(checkpoints):
            state.checkpoint_requested = True
            self._checkpoint = False


def _uneven(num_batches: int, own: float, total: float) -> TaskError:
    return TaskError(
        f"the last {num_batches} batches of this rank counted for {own:g} samples, and those of all "
        f"ranks for {total:g}: a plugin changes how many samples a batch has, on some ranks only",
        fix="have it change them alike on all ranks, or implement the action count_batch in it, so that "
        "the ranks compare what each batch counts for",
    )


def average_gradients(
    processes: DataParallel, state: State, optimizers: Mapping[str, Optimizer]
) -> None:
    """Averages the gradients of these optimizers' parameters over the ranks, in place.

    A parameter that no rank has used gets no gradient. Ranks can use different parameters only
    with `find_unused_parameters`.
    """
    params = [param for param in params_of(optimizers.values()) if param.requires_grad]
    if state.settings.find_unused_parameters:
        has = [param.grad is not None for param in params]
        masks: list[Any] = [None] * processes.data_world_size
        dist.all_gather_object(masks, has, group=processes.data_group)
        for param, used in zip(params, zip(*masks, strict=True), strict=True):
            if any(used) and param.grad is None:
                param.grad = torch.zeros_like(param)
    if processes.data_world_size == 1:
        return
    dense = []
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            total = param.grad.coalesce()
            dist.all_reduce(total, group=processes.data_group)
            param.grad = total / processes.data_world_size
        elif param.grad is not None:
            dense.append(local(param.grad))
    for bucket in _buckets(dense):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=processes.data_group)
        flat /= processes.data_world_size
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def take_from_first(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, buffers_alone: bool = False
) -> None:
    """Replaces every rank's buffers, and weights, with those of the first rank, in place.

    Args:
        group: `state.data_group`.
    """
    tensors = model.buffers() if buffers_alone else model.state_dict().values()
    for tensor in tensors:
        if isinstance(tensor, Tensor):  # what a module's get_extra_state returns needn't be
            dist.broadcast(local(tensor), group=group, group_src=0)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of one type, up to a size."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_type.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(one.nbytes for one in bucket) >= _BUCKET_BYTES:
            yield by_type.pop((tensor.dtype, tensor.device))
    yield from by_type.values()


def with_shared_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Returns the model with every batch norm synchronised over the ranks of `state.data_group`.

    Parameters and buffers stay the same objects under the same names. Lazy modules must be
    initialised.
    """
    if any(kind_of(param.device).has_sync_batch_norm for param in model.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
        return converted
    for name, child in model.named_children():
        setattr(model, name, with_shared_batch_norm(child, group))
    return _HostSyncBatchNorm.of(model, group) if isinstance(model, _BatchNorm) else model


class _HostSyncBatchNorm(_BatchNorm):
    """A batch norm with statistics over the batches of all ranks.

    Shapes: input and output (N, C, ...) with any N on each rank.
    """

    @classmethod
    def of(cls, other: _BatchNorm, group: dist.ProcessGroup | None) -> _HostSyncBatchNorm:
        """Creates one with the parameters and buffers of another batch norm."""
        made = cls.__new__(cls)
        made.__dict__ = other.__dict__ | {"group": group}
        return made

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalises over all ranks in training; in evaluation as `_BatchNorm`."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        num = values.new_full((1,), input.numel() / input.shape[1])
        sum_over: Any = _Sum.apply
        num, sums = sum_over(torch.cat([num, values.sum(dims)]), self.group).tensor_split([1])
        mean = sums / num
        centred = values - mean.view(shape)
        variance = sum_over(centred.square().sum(dims), self.group) / num
        if self.training and self.track_running_stats:
            self._track(mean.detach(), variance.detach(), num.detach())
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = normal.to(input.dtype)
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, num: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        momentum: Any = self.momentum
        if momentum is None:
            momentum = 1.0 / self.num_batches_tracked.float()
        unbiased = variance * (num / (num - 1))
        self.running_mean.mul_(1 - momentum).add_(mean * momentum)
        self.running_var.mul_(1 - momentum).add_(unbiased * momentum)


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
