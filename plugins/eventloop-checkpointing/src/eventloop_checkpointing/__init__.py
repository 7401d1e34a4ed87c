"""Activation checkpointing for eventloop."""

from eventloop_checkpointing.layers import checkpointed
from eventloop_checkpointing.plugin import Checkpointing

__all__ = ["Checkpointing", "checkpointed"]
