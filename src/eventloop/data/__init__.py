"""Data: batches, and where they come from, from any batch of a run on."""

from eventloop.data.batches import (
    Count,
    describe,
    describe_pair,
    inputs_of,
    is_inputs,
    is_pair,
    map_tensors,
    num_samples,
    split,
    targets_of,
    to_host,
    with_inputs,
    with_targets,
    without_samples,
)
from eventloop.data.combine import cycled, first_batch, is_map_style, known_length, zipped

__all__ = [
    "Count",
    "cycled",
    "describe",
    "describe_pair",
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
    "zipped",
]
