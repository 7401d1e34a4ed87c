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
    """Returns the number of steps after which old weights have half of the total weight.

    Args:
        decay: share of the old average that stays, in (0, 1).
    """
    return -math.log(2) / math.log(decay)


def share_of(half_life: float, amount: float) -> float:
    """Returns the share of new weights for which old weights halve after a half-life.

    Two moves with the share of amount 1 equal a single move with the share of amount 2, so the result
    doesn't depend on how training is divided into steps.

    Args:
        half_life: more than 0.
        amount: amount of training since the last move, in the unit of the half-life.

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
        share: in [0, 1], 1 - decay; a tensor of shape () on the device if the host doesn't know it yet.
    """
    averages = list(averages)
    # `foreach` needs tensors of the same dtype.
    values = [
        value if value.dtype is average.dtype else value.to(average.dtype)
        for value, average in zip(values, averages, strict=True)
    ]
    # Private, as all of torch's foreach functions are; the public way, a loop, starts a kernel for
    # each tensor. torch.optim.swa_utils does the same (torch 2.13).
    if isinstance(share, Tensor):
        shares = [share.to(average.dtype) for average in averages]
        torch._foreach_lerp_(averages, values, shares)
    else:
        torch._foreach_lerp_(averages, values, share)
