"""GRPO for eventloop: a language model learns from rewards for what it generates."""

from eventloop_grpo.from_command import task
from eventloop_grpo.losses import advantages_of, policy_loss
from eventloop_grpo.plugin import Grpo
from eventloop_rollouts import Rollouts, token_logps

__all__ = ["Grpo", "Rollouts", "advantages_of", "policy_loss", "task", "token_logps"]
