"""Rollouts for eventloop: completions that a model draws, and hooks for who generates and who judges."""

from eventloop_rollouts.generation import (
    Sampling,
    completed,
    generated,
    logits_of,
    seeds_of,
    token_logps,
)
from eventloop_rollouts.hooks import RolloutHooks
from eventloop_rollouts.named import named_reward, named_tokenizer
from eventloop_rollouts.rollouts import Rollouts, prompts_of, texts_of

__all__ = [
    "RolloutHooks",
    "Rollouts",
    "Sampling",
    "completed",
    "generated",
    "logits_of",
    "named_reward",
    "named_tokenizer",
    "prompts_of",
    "seeds_of",
    "texts_of",
    "token_logps",
]
