"""The maths of mixup: blends a batch with a permutation of itself.

Source: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412, eq. 1
and figure 1a. Blending the losses of both targets equals blending one-hot targets if the
loss is linear in them, as cross-entropy is, and also works with class indices.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor


def draw_lam(alpha: float, seed: int, batch: int) -> float:
    """Draws the share of the originals from Beta(alpha, alpha).

    The draw is a function of the arguments, on the host: no wait for the device, no state to save, and a
    resumed run draws the same share for batch 100 as an uninterrupted run.

    Args:
        alpha: more than 0; small values yield shares near 0 or 1, and 1.0 a uniform distribution.
        seed: seed of the plugin's generator, which differs between runs and ranks.
        batch: number of the batch in the run.

    Returns:
        A number in [0, 1].
    """
    return random.Random(f"{seed}/{batch}").betavariate(alpha, alpha)


def mix(inputs: Tensor, permutation: Tensor, lam: float) -> Tensor:
    """Blends each sample with another of the same batch: lam * x_i + (1 - lam) * x_j.

    Args:
        inputs: floating-point, the samples along the first dimension.
        permutation: int64, shape (num_samples,), on the device of `inputs`; j for each i.
        lam: share of the originals, in [0, 1].

    Returns:
        A new tensor of the shape and dtype of `inputs`; exactly the originals if lam is 1.
    """
    return torch.lerp(inputs[permutation], inputs, lam)
