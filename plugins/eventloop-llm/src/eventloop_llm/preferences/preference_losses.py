"""Preference losses as functions of the log-probabilities of answers."""

# B = pair or row of a batch

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

Loss = Literal["dpo", "ipo", "kto", "orpo", "simpo", "cpo"]


@dataclass(frozen=True)
class LossOptions:
    """The numbers of a loss.

    Args:
        has_reference: whether the loss is computed from log-ratios to a reference model.
        is_mean: whether an answer's log-probability is a mean over its tokens, not a sum.
        beta: how strongly the model is held to the reference; in ORPO the weight of the odds ratio.
        gamma: margin by which a chosen answer should lead.
        label_smoothing: assumed share of pairs whose preference is the wrong way round, in [0, 0.5).
        nll_weight: weight of the chosen answer's language modeling loss, averaged over a batch's tokens.
    """

    has_reference: bool = False
    is_mean: bool = False
    beta: float = 0.1
    gamma: float = 0.0
    label_smoothing: float = 0.0
    nll_weight: float = 0.0

    def __post_init__(self) -> None:
        if not (self.beta > 0 and math.isfinite(self.beta)):
            raise ValueError(f"beta={self.beta!r} is not a positive number")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing!r} isn't in [0, 0.5)")
        check_weights(gamma=self.gamma, nll_weight=self.nll_weight)


def check_weights(**weights: float) -> None:
    """Raises a ValueError for a weight that is negative or not finite."""
    for name, value in weights.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r} isn't a finite number of 0 or more")


# As in the papers, except for IPO: its authors average over tokens instead of summing.
LOSSES: dict[Loss, LossOptions] = {
    "dpo": LossOptions(has_reference=True),
    "ipo": LossOptions(has_reference=True, is_mean=True),
    "kto": LossOptions(has_reference=True),
    "orpo": LossOptions(is_mean=True, nll_weight=1.0),
    "simpo": LossOptions(is_mean=True, beta=2.0, gamma=1.0),
    "cpo": LossOptions(nll_weight=1.0),
}


def pair_losses(loss: Loss, chosen_B: Tensor, rejected_B: Tensor, options: LossOptions) -> Tensor:
    """Returns the loss of each pair, shape (B,), without the chosen answer's language modeling loss.

    Args:
        loss: any but kto.
        chosen_B: log-probabilities of chosen answers, or log-ratios to the reference; sums or means over
            tokens.
        rejected_B: the same for rejected answers.

    Source: Rafailov et al. 2023, arXiv:2305.18290, equation 7; Azar et al. 2023, arXiv:2310.12036,
    equation 17; Hong et al. 2024, arXiv:2403.07691, equation 7; Meng et al. 2024, arXiv:2405.14734,
    equation 6; Xu et al. 2024, arXiv:2401.08417, equation 3. Smoothing: Mitchell 2023, "A note on DPO with
    noisy preferences".
    """
    ahead_B = chosen_B - rejected_B
    if loss == "ipo":
        return (ahead_B - 1 / (2 * options.beta)) ** 2
    if loss == "orpo":
        return -options.beta * logsigmoid(ahead_B - _log1mexp(chosen_B) + _log1mexp(rejected_B))
    margin_B = options.beta * ahead_B - options.gamma
    swapped_frac = options.label_smoothing
    if not swapped_frac:
        return -logsigmoid(margin_B)
    # A swapped pair keeps the margin: its chosen answer has to make up for it.
    return -(1 - swapped_frac) * logsigmoid(margin_B) - swapped_frac * logsigmoid(-margin_B)


def kto_losses(
    ratios_B: Tensor,
    is_desired_B: Tensor,
    divergence: Tensor,
    *,
    beta: float,
    desired_weight: float = 1.0,
    undesired_weight: float = 1.0,
) -> Tensor:
    """Returns KTO's loss of each answer, shape (B,).

    Args:
        ratios_B: log-ratios of answers to the reference.
        is_desired_B: bool.
        divergence: divergence of the model from the reference, shape (), at least 0, without a gradient.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    sign_B = torch.where(is_desired_B, 1.0, -1.0)
    weight_B = torch.where(is_desired_B, desired_weight, undesired_weight)
    return weight_B * (1 - torch.sigmoid(beta * sign_B * (ratios_B - divergence)))


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) for x <= 0, accurate near 0 and for large negative x; finite at 0.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)  # of a certain answer; infinity has no gradient
    is_near = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    return torch.where(is_near, near, torch.log1p(-torch.exp(torch.where(is_near, -1.0, x))))
