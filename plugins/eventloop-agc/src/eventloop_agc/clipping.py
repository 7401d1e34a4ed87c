"""The maths of adaptive gradient clipping: no unit moves far, seen from the size of its weights.

Source: Brock et al. 2021, "High-Performance Large-Scale Image Recognition Without Normalization",
arXiv:2102.06171, eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eventloop.toolbox import groups_of, local, sum_over_


def unit_norms(tensor: Tensor) -> Tensor:
    """Returns the norm of each unit of a weight or gradient.

    A unit is the weights of one output: a row of a matrix, a filter of a convolution; a vector of
    biases or gains is one unit.

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
        params: at least one, each with a gradient, all on one device; shards are allowed.
        clip: the longest gradient, as a share of the unit's norm.
        eps: the norm that a unit has at least, so that one of zeros can move.

    Returns:
        The share of units whose gradient was shortened, shape ().
    """
    weights = [param for param in params if param.grad is not None]
    grads = [param.grad for param in weights if param.grad is not None]
    every = [*weights, *grads]
    sizes = [unit_norms(local(tensor)) for tensor in every]
    # Units that are spread over ranks: their norms are summed. A vector is one unit.
    groups_per_tensor = [groups_of(tensor, range(1, tensor.ndim) or (0,)) for tensor in every]
    squares = [
        size.square_() for size, groups in zip(sizes, groups_per_tensor, strict=True) if groups
    ]
    sum_over_(squares, [groups for groups in groups_per_tensor if groups])
    for square in squares:
        square.sqrt_()
    longest = torch.cat(sizes[: len(grads)]).clamp_(min=eps) * clip
    scales = (longest / torch.cat(sizes[len(grads) :])).clamp_(max=1)
    unit_scales = torch.split(scales, [len(size) for size in sizes[len(grads) :]])
    factors = [
        unit_scale.view(-1, *[1] * (len(grad.shape) - 1)) if grad.ndim else unit_scale.view(())
        for unit_scale, grad in zip(unit_scales, grads, strict=True)
    ]
    # One kernel for all tensors. The function is private, as all foreach functions of torch 2.13 are.
    torch._foreach_mul_([local(grad) for grad in grads], factors)
    return _share(unit_scales, grads, scales)


def _share(unit_scales: Sequence[Tensor], grads: Sequence[Tensor], scales: Tensor) -> Tensor:
    """Returns which share of the units of all ranks has a scale below 1."""
    along = [groups_of(grad, (0,) if grad.ndim > 1 else ()) for grad in grads]
    if not any(along):
        return (scales < 1).float().mean()
    shortened = [(unit_scale < 1).sum(dtype=torch.float32) for unit_scale in unit_scales]
    sum_over_(shortened, along)
    return torch.stack(shortened).sum() / sum(len(grad) if grad.ndim > 1 else 1 for grad in grads)
