"""Communication between ranks: counts and requests of a batch, gradients, statistics, weights, buffers."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private, but the only common base class of all batch norms, including SyncBatchNorm (torch 2.13).
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

# The default bucket size of torch's DistributedDataParallel.
_BUCKET_BYTES = 25 * 2**20
# While all ranks' batches have one size, counts are exchanged every so many batches.
_EXCHANGE_INTERVAL = 16
# A signal is noticed within this time, unless a single batch takes longer.
_NOTICED_S = 0.25
# How long to wait until all ranks have rewritten their records, which they do twice a second.
_RECORDS_S = 4 * POLL_S


class ExchangeOfRanks(Exchange):
    """Exchanges counts and requests between ranks: an asynchronous sum on the host.

    If the ranks' batches can differ in size, there is an exchange in each batch. Otherwise there is one
    every `_EXCHANGE_INTERVAL` batches, or more often if batches are slow, so that a signal isn't
    delayed. Rank 0's timings decide for all ranks, as all must exchange in the same batches.
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
        # Since the last exchange: number of batches, seconds on rank 0, and the sum of loss weights.
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
        """Adds the loss weight of a batch, which should be the same on all ranks."""
        self._weight += weight

    def start(self, state: State) -> None:
        since = self._since
        self._since = time.perf_counter()
        if self._processes.rank == 0:
            self._seconds += self._since - since
        self._num_batches += 1
        if self._board is not None:
            self._board.num_batches += 1
        # A plugin's request is granted only in exchanges that are due by batch count, so that it doesn't
        # depend on time: a repeated run must stop at the same batch.
        is_due = not state.even_batches or not (state.clock.batch + 1) % _EXCHANGE_INTERVAL
        if not is_due and self._num_batches < self._interval:
            return
        stops = self._is_urgent or (is_due and self._stop_reason is not None)
        self._sent = self._weight
        self._sent_digest = self._answers.digest
        counts = (state.count.samples, state.count.tokens, self._seconds, self._sent)
        # torch shares the array's memory: reading the sums from the array needs no call of torch.
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
        # Ranks that hold parts of one model train on the same samples, and each has counted them.
        num_copies = processes.world_size // processes.data_world_size
        return int(samples) // num_copies, int(tokens) // num_copies, seconds

    def _answered_differently(self) -> TaskError:
        """Returns the error that names the question, if the ranks' records in the store show it."""
        difference: Difference | None = None

        def has_difference() -> bool:
            nonlocal difference
            if self._board is not None:
                difference = self._board.difference()
            return difference is not None

        wait_until(has_difference, _RECORDS_S if self._board is not None else 0.0)
        if difference is None:
            return TaskError(
                "the ranks answered a question of the loop, such as should_skip_batch, differently in "
                f"the last {self._num_batches} batches",
                fix=DECIDED_ALONE,
            )
        return answered_differently(difference, self._answers, self._processes.layout)

    def settle(self, state: State) -> None:
        requests = (self._stop_reason, self._checkpoint, self._weight)
        reasons, checkpoints, weights = zip(*self._processes.all_gather(requests), strict=True)
        if any(weight != self._weight for weight in weights):
            raise _uneven(self._num_batches, self._weight, sum(weights))
        state.stop_reason = state.stop_reason or next(filter(None, reasons), None)
        if any(checkpoints):
            state.checkpoint_requested = True
            self._checkpoint = False


def _uneven(num_batches: int, weight: float, total: float) -> TaskError:
    return TaskError(
        f"the last {num_batches} batches of this rank counted for {weight:g} samples, and those of all "
        f"ranks for {total:g}: a plugin changes how many samples a batch has, on some ranks only",
        fix="change the number of samples alike on all ranks, or implement count_batch in the plugin, so "
        "that the ranks exchange the size of each batch",
    )


def average_gradients(
    processes: DataParallel, state: State, optimizers: Mapping[str, Optimizer]
) -> None:
    """Averages the gradients of these optimizers' parameters over the ranks, in place.

    A parameter that no rank has used gets no gradient. Ranks may use different parameters only with
    `find_unused_parameters`: a rank then contributes zeros for a parameter that it hasn't used.
    """
    params = [param for param in params_of(optimizers.values()) if param.requires_grad]
    if state.settings.find_unused_parameters:
        has_gradient = [param.grad is not None for param in params]
        masks: list[Any] = [None] * processes.data_world_size
        dist.all_gather_object(masks, has_gradient, group=processes.data_group)
        for param, used_by_rank in zip(params, zip(*masks, strict=True), strict=True):
            if any(used_by_rank) and param.grad is None:
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
        averages = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, average in zip(bucket, averages, strict=True):
            gradient.copy_(average.view_as(gradient))


def take_from_first(
    model: nn.Module, group: dist.ProcessGroup | None = None, *, buffers_alone: bool = False
) -> None:
    """Copies weights and buffers of the first rank into those of every other rank, in place.

    Args:
        group: `state.data_group`.
        buffers_alone: whether to leave the weights as they are.
    """
    tensors = model.buffers() if buffers_alone else model.state_dict().values()
    for tensor in tensors:
        if isinstance(tensor, Tensor):  # `get_extra_state` of a module can return anything
            dist.broadcast(local(tensor), group=group, group_src=0)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups tensors of the same type and device into buckets of about `_BUCKET_BYTES`."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_type.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(gradient.nbytes for gradient in bucket) >= _BUCKET_BYTES:
            yield by_type.pop((tensor.dtype, tensor.device))
    yield from by_type.values()


def with_shared_batch_norm(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Returns the model with every batch norm synchronised over the ranks of `state.data_group`.

    Parameters and buffers stay the same objects under the same names. Lazy modules must be
    initialised.
    """
    # torch's SyncBatchNorm works only on accelerators, and is faster there (torch 2.13).
    if any(kind_of(param.device).has_sync_batch_norm for param in model.parameters()):
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
        return converted
    for name, child in model.named_children():
        setattr(model, name, with_shared_batch_norm(child, group))
    return _HostSyncBatchNorm.of(model, group) if isinstance(model, _BatchNorm) else model


class _HostSyncBatchNorm(_BatchNorm):
    """A batch norm with statistics over the batches of all ranks, written in operations of any device.

    Shapes: input and output (N, C, ...) with any N on each rank.
    """

    @classmethod
    def of(cls, batch_norm: _BatchNorm, group: dist.ProcessGroup | None) -> _HostSyncBatchNorm:
        """Converts a batch norm; the result shares its parameters and buffers."""
        converted = cls.__new__(cls)
        # Without `__init__`, which would create new parameters; hooks are taken over, too.
        converted.__dict__ = batch_norm.__dict__ | {"group": group}
        return converted

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  torch's name
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalises with statistics of all ranks in training; in evaluation as `_BatchNorm` does."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        # The number of values is summed with the values: ranks may have batches of different sizes.
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
