"""The maths: losses of preferences, of log-probabilities of answers."""

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
        has_reference: whether log-probabilities are those beyond a reference's.
        is_mean: whether they are means over the tokens of an answer, or sums.
        beta: how far a model may move from the reference, the less the further; of ORPO the weight of
            the odds ratio.
        gamma: by how much a chosen answer should be ahead.
        label_smoothing: the share of pairs that are taken to be the wrong way round, in [0, 0.5).
        nll_weight: of the chosen answer's own loss, a mean over the tokens of a batch.
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
    """Raises a ValueError for one that isn't a finite number of 0 or more."""
    for name, value in weights.items():
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value!r} isn't a finite number of 0 or more")


# Each as in its paper, but for IPO's means, which its authors have in place of sums.
LOSSES: dict[Loss, LossOptions] = {
    "dpo": LossOptions(has_reference=True),
    "ipo": LossOptions(has_reference=True, is_mean=True),
    "kto": LossOptions(has_reference=True),
    "orpo": LossOptions(is_mean=True, nll_weight=1.0),
    "simpo": LossOptions(is_mean=True, beta=2.0, gamma=1.0),
    "cpo": LossOptions(nll_weight=1.0),
}


def pair_losses(loss: Loss, chosen_B: Tensor, rejected_B: Tensor, options: LossOptions) -> Tensor:
    """Returns the loss of each pair, shape (B,), without the chosen answer's own.

    Args:
        loss: which; not kto.
        chosen_B: log-probabilities of chosen answers, less the reference's if there is one; means over
            tokens or sums.
        rejected_B: likewise.

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
    wrong = options.label_smoothing
    if not wrong:
        return -logsigmoid(margin_B)
    # Without the margin that is asked for, the other way round has it to make up.
    return -(1 - wrong) * logsigmoid(margin_B) - wrong * logsigmoid(-margin_B)


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
        ratios_B: log-probabilities of answers, less the reference's.
        is_desired_B: bool.
        divergence: of the model from the reference, shape (), not less than 0, without a gradient.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equation 8.
    """
    sign_B = torch.where(is_desired_B, 1.0, -1.0)
    weight_B = torch.where(is_desired_B, desired_weight, undesired_weight)
    return weight_B * (1 - torch.sigmoid(beta * sign_B * (ratios_B - divergence)))


def _log1mexp(x: Tensor) -> Tensor:
    """Returns log(1 - exp(x)) for x <= 0, without losing small numbers; for 0 it is finite, too.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)  # of a certain answer; infinity has no gradient
    is_near = x > -math.log(2)
    near = torch.log(-torch.expm1(torch.where(is_near, x, -1.0)))
    return torch.where(is_near, near, torch.log1p(-torch.exp(torch.where(is_near, -1.0, x))))
