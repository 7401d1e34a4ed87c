"""The maths of an exponential moving average.

Source: Tarvainen & Valpola 2017, "Mean teachers are better role models", arXiv:1703.01780,
section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def half_life_of(decay: float) -> float:
    """Returns after how many steps old weights count for half, where each leaves them `decay`.

    Args:
        decay: share of the old average that stays, in (0, 1).
    """
    return -math.log(2) / math.log(decay)


def share_of(half_life: float, amount: float) -> float:
    """Returns the share of new weights that makes old ones count for half after a half-life.

    However it is cut into steps: the shares of 1 and 1 leave of the old what that of 2 leaves.

    Args:
        half_life: more than 0.
        amount: of the same unit; how much has been trained since the last move.

    Returns:
        1 - 2 ** (-amount / half_life), in [0, 1].
    """
    return -math.expm1(-math.log(2) * amount / half_life)


@torch.no_grad()
def move(averages: Sequence[Tensor], values: Sequence[Tensor], share: float | Tensor) -> None:
    """Moves each average towards its value: a <- a + share * (v - a).

    Args:
        averages: floating-point or complex; changed in place.
        values: same order and shapes, of any precision.
        share: in [0, 1]; 1 - decay where a decay is given. On the device, shape (), where it isn't
            known on the host yet.
    """
    averages = list(averages)
    pairs = zip(values, averages, strict=True)
    values = [one if one.dtype is other.dtype else one.to(other.dtype) for one, other in pairs]
    # Private, as all of torch's foreach functions are; the public way, a loop, starts a kernel for
    # each tensor. torch.optim.swa_utils does the same (torch 2.13).
    if isinstance(share, Tensor):
        torch._foreach_lerp_(averages, values, [share.to(one.dtype) for one in averages])
    else:
        torch._foreach_lerp_(averages, values, share)
