"""Data: batches, and the sources that yield them from any batch of a run on."""

from eventloop.data.batches import to_host
from eventloop.data.combined import cycled, zipped
from eventloop.data.in_memory import tensors
from eventloop.data.microbatches import Microbatches, collated

__all__ = ["Microbatches", "collated", "cycled", "tensors", "to_host", "zipped"]
