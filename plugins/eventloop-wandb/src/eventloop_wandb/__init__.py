"""Runs of eventloop in Weights & Biases: numbers and configuration, online or offline."""

from eventloop_wandb.config import config_of
from eventloop_wandb.offline import offline_rows
from eventloop_wandb.plugin import Wandb

__all__ = ["Wandb", "config_of", "offline_rows"]
