"""The maths of SAM: the way to the highest loss nearby, and the way back.

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
    """Returns the step from each parameter to where the loss is highest nearby, to first order.

    rho * g / ||g||, with the norm over all parameters together; adaptive: rho * w^2 * g / ||w * g||,
    whose size relative to w stays if one layer is scaled up and the next one down.

    Args:
        params: with gradients, at least one; floating-point, all on one device. Shards, too.
        rho: how far "nearby" reaches.

    Returns:
        New tensors of the shapes and dtypes of `params`, of shards what this rank holds; zeros where every gradient is zero.
    """
    towards = [param.grad for param in params if param.grad is not None]
    if adaptive:
        towards = [grad * weight for grad, weight in zip(towards, params, strict=True)]
    norm = total_norm(towards)
    held = [local(one) for one in towards]
    # Private, as all of torch's foreach functions are: one kernel for all tensors (torch 2.13).
    if adaptive:
        held = list(torch._foreach_mul(held, [local(param) for param in params]))
    return list(torch._foreach_mul(held, rho / (norm + _TINY)))


@contextmanager
def restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Puts tensors back, bit for bit, when the block ends, however it ends."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Puts a model's buffers back likewise, those that a forward pass has replaced, too."""
    places = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    with restored([buffer for *_, buffer in places]):
        try:
            yield
        finally:
            for module, name, buffer in places:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
