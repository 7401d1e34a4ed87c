"""The maths of adaptive gradient clipping: no unit moves far, seen from the size of its weights.

Source: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
arXiv:2102.06171, eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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
    parts = torch.split(scales, [len(size) for size in sizes])
    shapes = [(-1, *[1] * (grad.ndim - 1))[: grad.ndim] for grad in grads]
    each = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    # Private, as all of torch's foreach functions are: one kernel for all tensors (torch 2.13).
    torch._foreach_mul_(grads, each)
    share = (scales < 1).float().mean()
    if type(share) is not Tensor:  # of shards; the import of their class would take a while
        share = cast("DTensor", share).full_tensor()
    return share
