"""Group-relative policy optimization: advantages, the clipped loss and the penalty; free of hooks."""

# N = completion, T = position of a completion

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["grpo", "dapo", "dr_grpo"]
LOSSES: tuple[LossKind, ...] = ("grpo", "dapo", "dr_grpo")
Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")
# Keeps advantages small in a group whose rewards are nearly equal.
_EPSILON = 1e-4


def advantages_of(rewards_N: Tensor, group_size: int, std: Tensor | None = None) -> Tensor:
    """Returns how much better each completion is than the mean of its group, in standard deviations.

    Args:
        rewards_N: float32; the completions of a prompt are adjacent.
        group_size: number of completions of a prompt.
        std: divisor of the differences; None for the standard deviation of each group.

    Returns:
        Shape (N,).

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.
    """
    groups = rewards_N.view(-1, group_size)
    differences = groups - groups.mean(1, keepdim=True)
    if std is None:
        std = groups.std(1, keepdim=True) if group_size > 1 else torch.zeros_like(groups)
    return (differences / (std + _EPSILON)).flatten()


def centred(rewards_N: Tensor, group_size: int) -> Tensor:
    """Returns the differences from the mean of each group, undivided.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
    """
    groups = rewards_N.view(-1, group_size)
    return (groups - groups.mean(1, keepdim=True)).flatten()


@dataclass(frozen=True)
class PolicyTerms:
    """A loss, and the numbers to log with it.

    Args:
        loss: shape ().
        clipped_frac: share of tokens with a clipped ratio.
        kl: mean divergence from the reference over all tokens; None without a reference.
    """

    loss: Tensor
    clipped_frac: Tensor
    kl: Tensor | None


def policy_loss(
    logps_NT: Tensor,
    old_logps_NT: Tensor,
    advantages_N: Tensor,
    mask_NT: Tensor,
    *,
    kind: LossKind = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    reference_logps_NT: Tensor | None = None,
    max_tokens: int = 1,
) -> PolicyTerms:
    """Returns the clipped loss of completions, averaged over the tokens or completions of `weight_of`.

    Args:
        logps_NT: log-probabilities under the policy that is trained.
        old_logps_NT: log-probabilities under the policy that drew the tokens, without gradients.
        mask_NT: float, 1 for tokens that contribute to the loss.
        kind: "grpo": mean over completions of the mean over their tokens; "dapo": mean over tokens;
            "dr_grpo": mean over completions of the sum over their tokens, divided by `max_tokens`.
        epsilon, epsilon_high: ratios are clipped to [1 - epsilon, 1 + epsilon_high]; `epsilon_high`
            defaults to `epsilon`.
        beta: weight of the divergence from the reference.
        unbiased_kl: whether the divergence is multiplied by the ratio, which makes its gradient the
            gradient of the divergence under the policy, DeepSeek-AI 2025, arXiv:2512.02556.
        reference_logps_NT: log-probabilities under the reference.
        max_tokens: maximum number of tokens in a completion.

    Source: Shao et al. 2024, arXiv:2402.03300; Yu et al. 2025, "DAPO", arXiv:2503.14476; Liu et al.
    2025, arXiv:2503.20783.
    """
    ratio_NT = (logps_NT - old_logps_NT).exp()
    highest = 1 + (epsilon if epsilon_high is None else epsilon_high)
    gains_N1 = advantages_N[:, None]
    plain_NT = ratio_NT * gains_N1
    clipped_NT = ratio_NT.clamp(1 - epsilon, highest) * gains_N1
    losses_NT = -torch.minimum(plain_NT, clipped_NT)
    num_tokens = mask_NT.sum().clamp(min=1.0)
    kl = None
    if reference_logps_NT is not None:
        gap_NT = reference_logps_NT - logps_NT
        # Schulman's estimator: unbiased, and never negative.
        kl_NT = gap_NT.exp() - gap_NT - 1
        losses_NT = losses_NT + beta * (kl_NT * ratio_NT if unbiased_kl else kl_NT)
        kl = (kl_NT.detach() * mask_NT).sum() / num_tokens
    summed_N = (losses_NT * mask_NT).sum(1)
    if kind == "grpo":
        loss = (summed_N / mask_NT.sum(1).clamp(min=1.0)).mean()
    elif kind == "dapo":
        loss = summed_N.sum() / num_tokens
    else:
        loss = summed_N.mean() / max_tokens
    is_clipped_NT = (clipped_NT < plain_NT).detach() * mask_NT
    return PolicyTerms(loss, is_clipped_NT.sum() / num_tokens, kl)


def weight_of(mask_NT: Tensor, kind: LossKind) -> Tensor | int:
    """Returns the number of tokens or completions over which a loss is averaged."""
    return mask_NT.sum() if kind == "dapo" else len(mask_NT)
