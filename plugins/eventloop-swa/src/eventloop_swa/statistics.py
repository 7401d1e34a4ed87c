"""Statistics of batch norms, estimated anew for weights that were never trained with.

Source: Izmailov et al. 2018, arXiv:1803.05407, section 3.2; `torch.optim.swa_utils.update_bn`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

# Private, but what all batch norms are, those over several ranks included (torch 2.13).
from torch.nn.modules.batchnorm import _BatchNorm


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Returns the batch norms that learn statistics from what they see, by name.

    One in evaluation mode doesn't: it was frozen, and keeps what it has.
    """
    return {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, _BatchNorm) and one.training and one.running_mean is not None
    }


@contextmanager
def estimating(model: nn.Module) -> Iterator[None]:
    """Has batch norms forget what they have seen, and take the mean over all batches that come.

    The model is left in the mode in which it is: dropout drops, as in training.
    """
    norms = batch_norms(model).values()
    momenta = [one.momentum for one in norms]
    for one in norms:
        one.reset_running_stats()
        one.momentum = None  # which is torch's word for a mean over all batches
    try:
        yield
    finally:
        for one, momentum in zip(norms, momenta, strict=True):
            one.momentum = momentum
