"""Reward models for eventloop: a task that learns from pairs which answer is better."""

from eventloop_reward.from_command import reward_model, task
from eventloop_reward.losses import reward_losses

__all__ = ["reward_losses", "reward_model", "task"]
