"""Averages or copies tensors over ranks: gradients, batch norm statistics, weights and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Private, but what all batch norms are, those over several ranks included (torch 2.13).
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from eventloop.devices import kind_of
from eventloop.training.optimizers import params_of
from eventloop.training.sharded_tensors import local

if TYPE_CHECKING:
    from eventloop.distributed.data_parallel import DataParallel
    from eventloop.state import State

# As many as torch's DistributedDataParallel sends in one go.
_BUCKET_BYTES = 25 * 2**20


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
    gradients = [local(param.grad) for param in params if param.grad is not None]
    for bucket in _buckets(gradients if processes.data_world_size > 1 else ()):
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
        """Normalises over all ranks in training, with the running statistics in evaluation."""
        if not self.training and self.running_mean is not None:
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
        ctx.group, total = group, local.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
