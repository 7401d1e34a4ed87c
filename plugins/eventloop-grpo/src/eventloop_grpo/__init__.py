"""GRPO for eventloop: a language model learns from rewards for what it generates."""

from eventloop_grpo.generation import Sampling
from eventloop_grpo.hooks import GrpoHooks
from eventloop_grpo.losses import advantages_of, policy_loss, token_logps
from eventloop_grpo.plugin import Grpo
from eventloop_grpo.rollouts import Rollouts, prompts_of

__all__ = [
    "Grpo",
    "GrpoHooks",
    "Rollouts",
    "Sampling",
    "advantages_of",
    "policy_loss",
    "prompts_of",
    "token_logps",
]
