"""Sharded tensors: to the slices in a checkpoint and back, norms; layers that repeat; layouts of ranks."""

from __future__ import annotations

from eventloop.checkpoint.shard_reading import shard_of, shards_like
from eventloop.mesh import Layout
from eventloop.training.compiling import repeated_layers
from eventloop.training.sharded_tensors import (
    groups_of,
    local,
    sharded,
    slice_of,
    sum_over_,
    total_norm,
)

__all__ = ["Layout", "groups_of", "local", "repeated_layers", "shard_of", "sharded", "shards_like"]
__all__ += ["slice_of", "sum_over_", "total_norm"]
