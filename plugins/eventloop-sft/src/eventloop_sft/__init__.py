"""Supervised fine-tuning for eventloop: a task that trains a language model on chats."""

from eventloop_sft.from_command import task

__all__ = ["task"]
