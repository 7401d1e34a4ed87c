"""Statistics of batch norms, estimated for averaged weights, which were never trained with.

Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2; `torch.optim.swa_utils.update_bn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# Private, but the base class of all batch norms, including those over several ranks (torch 2.13).
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Returns the batch norms that update their statistics, by name.

    Batch norms in evaluation mode are excluded: they are frozen, and keep their statistics.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
    }


@contextmanager
def estimating(model: nn.Module) -> Iterator[None]:
    """Resets batch norms, and makes them average over all batches inside the block.

    The model stays in its current mode: dropout is active, as in training.
    """
    norms = batch_norms(model).values()
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # in torch, None means an average over all batches
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
