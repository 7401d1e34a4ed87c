"""Tensors of all ranks made one: gradients averaged, weights and buffers taken from rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State

# As many as torch's DistributedDataParallel sends in one go.
_BUCKET_BYTES = 25 * 2**20


def average_gradients(
    processes: Processes, state: State, optimizers: Mapping[str, Optimizer]
) -> None:
    """Averages the gradients of these optimizers' parameters over the ranks, in place.

    A parameter that no rank has used keeps no gradient. Which ranks have used which is asked for
    only with `find_unused_parameters`; without it, all must have used the same.
    """
    params = [
        param
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    ]
    if state.settings.find_unused_parameters:
        masks = processes.all_gather([param.grad is not None for param in params])
        for param, used in zip(params, zip(*masks, strict=True), strict=True):
            if any(used) and param.grad is None:
                param.grad = torch.zeros_like(param)
    gradients = [param.grad for param in params if param.grad is not None]
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        flat /= processes.world_size
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def take_from_first(model: nn.Module, *, buffers_alone: bool = False) -> None:
    """Replaces every rank's buffers, and weights, with those of rank 0, in place."""
    tensors = model.buffers() if buffers_alone else model.state_dict().values()
    for tensor in tensors:
        dist.broadcast(tensor, 0)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Puts tensors of one type together, up to a size."""
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_type.setdefault((tensor.dtype, tensor.device), [])
        bucket.append(tensor)
        if sum(one.nbytes for one in bucket) >= _BUCKET_BYTES:
            yield by_type.pop((tensor.dtype, tensor.device))
    yield from by_type.values()
