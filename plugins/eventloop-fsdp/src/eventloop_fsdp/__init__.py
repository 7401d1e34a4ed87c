"""FSDP2 for eventloop: shards parameters, gradients and optimizer states over the ranks."""

from eventloop_fsdp.parts import parts_of, shard
from eventloop_fsdp.plugin import Fsdp

__all__ = ["Fsdp", "parts_of", "shard"]
