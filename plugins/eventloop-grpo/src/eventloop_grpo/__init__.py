"""GRPO for eventloop: a language model learns from rewards for what it generates."""

from eventloop_grpo.losses import advantages_of, policy_loss, token_logps
from eventloop_grpo.plugin import Grpo
from eventloop_rollouts import Rollouts

__all__ = ["Grpo", "Rollouts", "advantages_of", "policy_loss", "token_logps"]
