"""Tensors by name: weights from files and checkpoints, slices, nested states, whole checkpoints."""

from __future__ import annotations

from eventloop.checkpoint.encoding import flatten
from eventloop.checkpoint.format import read as read_checkpoint
from eventloop.checkpoint.format import write as write_checkpoint
from eventloop.checkpoint.saved_tensors import SavedTensor
from eventloop.checkpoint.weights import weights_at
from eventloop.distributed.averaging import take_from_first
from eventloop.training.slices import TensorSlice, gathered

__all__ = [
    "SavedTensor",
    "TensorSlice",
    "flatten",
    "gathered",
    "read_checkpoint",
    "take_from_first",
    "weights_at",
    "write_checkpoint",
]
