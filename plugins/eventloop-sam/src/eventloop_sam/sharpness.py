"""The maths of SAM: the step to the highest loss nearby, and the way back.

    with restored(params):
        for param, step in zip(params, ascent(params, rho=0.05), strict=True):
            param.data += step
        loss().backward()  # from empty gradients
    optimizer.step()

Source: Foret et al. 2021, "Sharpness-Aware Minimization for Efficiently Improving Generalization",
arXiv:2010.01412, eq. 2; adaptive: Kwon et al. 2021, "ASAM", arXiv:2102.11600, eq. 8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eventloop.toolbox import local, total_norm

_TINY = 1e-12  # a gradient of 0 has no direction


@torch.no_grad()
def ascent(params: Sequence[Tensor], rho: float, *, adaptive: bool = False) -> list[Tensor]:
    """Returns the step of each parameter to the highest loss nearby, to first order.

    rho * g / ||g||, with the norm over all parameters together; adaptive: rho * w^2 * g / ||w * g||,
    whose size relative to w doesn't change if a layer is scaled up and the next layer down.

    Args:
        params: at least one parameter with a gradient; floating-point, all on the same device. May be
            sharded.
        rho: radius of the neighbourhood.

    Returns:
        New tensors of the shapes and dtypes of `params`; of shards, this rank's part. Zeros if every
        gradient is zero.
    """
    directions = [param.grad for param in params if param.grad is not None]
    if adaptive:
        directions = [grad * weight for grad, weight in zip(directions, params, strict=True)]
    norm = total_norm(directions)
    steps = [local(direction) for direction in directions]
    # Private, like all of torch's foreach functions: a single kernel for all tensors (torch 2.13).
    if adaptive:
        steps = list(torch._foreach_mul(steps, [local(param) for param in params]))
    return list(torch._foreach_mul(steps, rho / (norm + _TINY)))


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restores tensors, bit for bit, at the end of the block, even after an error."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Restores a model's buffers at the end of the block, including buffers that were replaced."""
    owned_buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with restored([buffer for *_, buffer in owned_buffers]):
        try:
            yield
        finally:
            for module, name, buffer in owned_buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
