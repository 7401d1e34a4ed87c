"""Samples, inputs and targets of batches of any structure."""

from __future__ import annotations

from eventloop.data.batches import (
    describe,
    describe_pair,
    inputs_of,
    is_pair,
    map_tensors,
    num_samples,
    targets_of,
    with_inputs,
    with_targets,
)
from eventloop.data.combine import known_length
from eventloop.data.microbatch_splitting import split
from eventloop.data.microbatches import Microbatches
from eventloop.data.sample_seeds import reads_batches

__all__ = [
    "Microbatches",
    "describe",
    "describe_pair",
    "inputs_of",
    "is_pair",
    "known_length",
    "map_tensors",
    "num_samples",
    "reads_batches",
    "split",
    "targets_of",
    "with_inputs",
    "with_targets",
]
