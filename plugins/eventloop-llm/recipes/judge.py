"""The reward of the recipe `grpo.yaml`."""

from __future__ import annotations

import torch

from eventloop_llm.rollouts.completions import Rollouts


def short(rollouts: Rollouts) -> torch.Tensor:
    """Returns the share of the allowed tokens that each answer leaves unused."""
    return 1 - rollouts.completion_mask.mean(1)
