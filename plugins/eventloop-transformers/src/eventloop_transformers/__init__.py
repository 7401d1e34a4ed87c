"""Runs Hugging Face's Trainer, and any subclass of it, on eventloop's loop, unchanged."""

from eventloop_transformers.check_loss_task import loss_task
from eventloop_transformers.trainer import Trainer, on_eventloop

__all__ = ["Trainer", "loss_task", "on_eventloop"]
