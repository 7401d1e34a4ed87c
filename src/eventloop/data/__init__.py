"""Data: batches, and where they come from, from any batch of a run on."""

from eventloop.data.batches import (
    Count,
    describe,
    first_batch,
    inputs_of,
    is_inputs,
    is_map_style,
    is_pair,
    known_length,
    map_tensors,
    num_samples,
    split,
    targets_of,
    to_host,
    with_inputs,
    with_targets,
    without_samples,
)

__all__ = [
    "Count",
    "describe",
    "first_batch",
    "inputs_of",
    "is_inputs",
    "is_map_style",
    "is_pair",
    "known_length",
    "map_tensors",
    "num_samples",
    "split",
    "targets_of",
    "to_host",
    "with_inputs",
    "with_targets",
    "without_samples",
]
