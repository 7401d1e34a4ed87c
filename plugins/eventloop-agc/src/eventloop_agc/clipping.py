"""The maths of adaptive gradient clipping: no unit moves far, seen from the size of its weights.

Source: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
arXiv:2102.06171, eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eventloop.toolbox.shards import local, shard_of, sharded


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the norm of each unit of a weight or gradient.

    A unit is what gives one output: a row of a matrix, a filter of a convolution; a vector, of
    biases or gains, is one unit.

    Args:
        tensor: floating-point, of any shape; its units along the first dimension.

    Returns:
        Shape (num_units,), float32 at least.
    """
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    within = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=within, dtype=dtype)
    return norms if within else norms.reshape(1)


@torch.no_grad()
def clip_units_(params: Sequence[Tensor], clip: float, eps: float = 1e-3) -> Tensor:
    """Shortens the gradient of each unit to `clip` times the norm of its weights, in place.

    Nothing waits for the device. A gradient that needn't be shortened keeps its bits.

    Args:
        params: with a gradient at least one, all on one device; shards, too.
        clip: the longest gradient, as a share of the unit's norm.
        eps: the norm that a unit has at least, so that one of zeros can move.

    Returns:
        The share of units whose gradient was shortened, shape ().
    """
    weights = [param for param in params if param.grad is not None]
    grads = [param.grad for param in weights if param.grad is not None]
    sizes = [unit_norms(weight) for weight in weights]
    longest = torch.cat(sizes).clamp_(min=eps) * clip
    scales = (longest / torch.cat([unit_norms(grad) for grad in grads])).clamp_(max=1)
    of_shards = sharded(scales)
    scales = scales if of_shards is None else of_shards.full_tensor()
    parts = torch.split(scales, [len(size) for size in sizes])
    each = [_like_rows(part, grad) for part, grad in zip(parts, grads, strict=True)]
    # Private, as all of torch's foreach functions are: one kernel for all tensors (torch 2.13).
    torch._foreach_mul_([local(grad) for grad in grads], each)
    return (scales < 1).float().mean()


def _like_rows(scales: Tensor, grad: Tensor) -> Tensor:
    """Returns the scales of the units that this rank holds of a gradient, shaped to multiply it."""
    held = scales if len(scales) == 1 else shard_of(scales, grad)
    return held.view((-1, *[1] * (grad.ndim - 1))[: grad.ndim])
