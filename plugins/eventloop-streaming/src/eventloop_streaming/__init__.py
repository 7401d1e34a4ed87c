"""Streams for eventloop whose position can be saved: shuffled, mixed, of shards, in batches."""

from eventloop_streaming.batches import Batches
from eventloop_streaming.mixed import Mixed
from eventloop_streaming.permuted import Permuted
from eventloop_streaming.shards import Shards, Sliced
from eventloop_streaming.shuffled import Shuffled
from eventloop_streaming.stream import Stream

__all__ = ["Batches", "Mixed", "Permuted", "Shards", "Shuffled", "Sliced", "Stream"]
