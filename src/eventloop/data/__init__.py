"""Data: batches, and where they come from, from any batch of a run on."""

from eventloop.data.batches import to_host
from eventloop.data.combine import cycled, zipped

__all__ = ["cycled", "to_host", "zipped"]
