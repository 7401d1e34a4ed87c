"""What is rewarded in the recipe `grpo.yaml`."""

from __future__ import annotations

import torch

from eventloop_rollouts import Rollouts


def short(rollouts: Rollouts) -> torch.Tensor:
    """Returns for each answer which share of the tokens that it may have it has not taken."""
    return 1 - rollouts.completion_mask.mean(1)
