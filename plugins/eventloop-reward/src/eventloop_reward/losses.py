"""The maths: how far rewards of a pair are from saying which answer is better."""

# B = pair of a batch

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def reward_losses(
    chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor | float = 0.0, center_weight: float = 0.0
) -> Tensor:
    """Returns the loss of each pair, shape (B,).

    Args:
        chosen_B: rewards of the better answers.
        rejected_B: those of the others.
        margin_B: by how much the first should be more.
        center_weight: of the square of their sum, which keeps rewards around 0.

    Source: Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1. The margin: Touvron et
    al. 2023, arXiv:2307.09288, equation 2; centering: Eisenstein et al. 2023, arXiv:2312.09244, equation 2.
    """
    losses_B = -logsigmoid(chosen_B - rejected_B - margin_B)
    return losses_B + center_weight * (chosen_B + rejected_B) ** 2
