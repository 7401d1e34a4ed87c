"""A gather over ranks whose gradients come back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.size = len(rows)
        ctx.group = group
        rows_of_ranks = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows_of_ranks, rows.contiguous(), group)
        return torch.cat(rows_of_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        begin = dist.get_rank(ctx.group) * ctx.size
        return total[begin : begin + ctx.size], None


def all_gather(rows: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the rows of all ranks, in the order of ranks; with gradients, unlike torch's.

    For a loss that each rank computes over the samples of all ranks. As ranks average their gradients,
    the result is the gradient of that loss. In one process it returns the tensor itself. Collective:
    every rank must call it.

    Args:
        rows: shape (N, ...), the same on all ranks.
        group: the ranks; `state.data_group`, where some share their samples. None for all.

    Returns:
        Shape (N * ranks, ...).

    Raises:
        ValueError: the ranks have different shapes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return rows
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tuple(rows.shape), group)
    if len(set(shapes)) > 1:
        raise ValueError(
            f"all_gather: the ranks have tensors of shapes {', '.join(map(str, shapes))}; let the data "
            "loader drop a last batch that is smaller, drop_last=True"
        )
    gathered: Tensor = _AllGather.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered
