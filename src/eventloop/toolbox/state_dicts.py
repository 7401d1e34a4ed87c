"""State dicts: weights from files and checkpoints, slices, nested states, whole checkpoints."""

from __future__ import annotations

from eventloop.checkpoint.checkpoint_files import Checkpoint as Checkpoint
from eventloop.checkpoint.checkpoint_files import read_checkpoint as read_checkpoint
from eventloop.checkpoint.checkpoint_files import write_checkpoint as write_checkpoint
from eventloop.checkpoint.encoding import flatten
from eventloop.checkpoint.saved_tensors import SavedTensor
from eventloop.checkpoint.weight_files import FoundWeights, saved_weights_at, weights_at, with_tied
from eventloop.distributed.tensor_collectives import take_from_first
from eventloop.training.sharded_tensors import gathered
from eventloop.training.tensor_slices import TensorSlice

__all__ = [
    "Checkpoint",
    "FoundWeights",
    "SavedTensor",
    "TensorSlice",
    "flatten",
    "gathered",
    "read_checkpoint",
    "saved_weights_at",
    "take_from_first",
    "weights_at",
    "with_tied",
    "write_checkpoint",
]
