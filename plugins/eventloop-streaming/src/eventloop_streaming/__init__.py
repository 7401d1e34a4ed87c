"""Data for eventloop whose position can be saved: streams, an order, and a loader with threads."""

from eventloop_streaming.batches import Batches
from eventloop_streaming.iterators import IteratorState
from eventloop_streaming.litdata_state import LitdataState
from eventloop_streaming.mixed import Mixed
from eventloop_streaming.random_order import Permuted
from eventloop_streaming.shards import Shards, Sliced, StreamState
from eventloop_streaming.shuffle_buffer import Shuffled
from eventloop_streaming.stream import Stream
from eventloop_streaming.threads import ThreadedDataLoader

__all__ = [
    "Batches",
    "IteratorState",
    "LitdataState",
    "Mixed",
    "Permuted",
    "Shards",
    "Shuffled",
    "Sliced",
    "Stream",
    "StreamState",
    "ThreadedDataLoader",
]
