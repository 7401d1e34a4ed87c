"""The samples of a `datasets` stream that resuming in mid-epoch loses, and when it fails (datasets 5.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from eventloop import TaskError

_MOST_PARTS = 1_000
# Private attributes of `datasets`, without public access (5.2), and attributes of this package's streams.
_INNER = ("dataset", "_ex_iterable", "ex_iterable", "_source", "_own")
_SEVERAL = ("ex_iterables", "_sources")


def note_on(loader: Any, num_parts: int) -> str:
    """Returns the header's note on resuming with a data loader; empty if nothing is lost.

    Args:
        loader: a data loader, of a `datasets` stream or any other data.
        num_parts: number of workers of all ranks, each with its own buffer.
    """
    num_workers = getattr(loader, "num_workers", 0)
    if (stuck := _stuck(loader)) is not None:
        return (
            f"data: {stuck}: a run can't go on in mid-epoch, only from the end of an epoch; {_INSTEAD} can, "
            "and loses no sample"
        )
    sizes = [
        stream_part.buffer_size
        for stream_part in _parts(loader)
        if _is(stream_part, "BufferShuffled")
    ]
    if max(sizes, default=0) > 1:
        return (
            f"data: `datasets` shuffle the train stream in a buffer of {max(sizes):,} samples that "
            f"isn't saved: a run that goes on in mid-epoch loses and repeats up to {sum(sizes) * num_parts:,}; "
            "eventloop_streaming.Shuffled(stream, buffer_size) in its place does neither"
        )
    if num_workers < 2 or not _is_stream(loader.dataset):
        return ""
    return (
        f"data: a stream of `datasets` with {num_workers} workers: a run that was resumed in mid-epoch and stops "
        f"again within {num_workers} batches loses and repeats up to what {num_workers - 1} of {num_workers} workers had "
        "read of the epoch; eventloop_streaming.StreamState(stream) in its place does neither"
    )


_INSTEAD = (
    "eventloop_streaming.Shuffled(stream.shuffle(seed=0, buffer_size=1, max_buffer_input_shards=1), "
    "buffer_size) in its place"
)


def require_can_go_on(loader: Any) -> None:
    """Raises TaskError for a data loader whose workers can't load the state of their stream."""
    if (stuck := _stuck(loader)) is not None:
        raise TaskError(
            f"the run was stopped in mid-epoch, and can't go on there: {stuck}",
            fix=f"resume from a checkpoint at the end of an epoch; in a new run, {_INSTEAD} goes on anywhere",
        )


def _stuck(loader: Any) -> str | None:
    """Returns the reason why workers would raise an IndexError in `datasets`; None if they wouldn't.

    A worker first loads the state of its own shards into the whole stream, which has more shards.
    """
    num_workers = getattr(loader, "num_workers", 0)
    streams = [stream_part for stream_part in _parts(loader) if _is_stream(stream_part)]
    if num_workers < 2 or not streams or not sys.modules["datasets"].__version__.startswith("5.2."):
        return None
    for stream_part in _parts(loader):
        if _is(stream_part, "InterleavedShards"):
            # Number of shards per rank, if ranks split the shards.
            num_shards = min([stream_part.num_shards, *(stream.num_shards for stream in streams)])
            at_once = min(num_shards, stream_part.max_input_shards)
            if max(1, num_shards // num_workers) < at_once:
                return (
                    f"`datasets` {sys.modules['datasets'].__version__} can't load the state of a stream that is shuffled from "
                    f"{at_once} shards at once (max_buffer_input_shards) where one of {num_workers} workers has fewer"
                )
    return None


def _is_stream(data: Any) -> bool:
    return "datasets" in sys.modules and isinstance(data, sys.modules["datasets"].IterableDataset)


def _is(stream_part: Any, name: str) -> bool:
    return type(stream_part).__name__ == f"{name}ExamplesIterable"


def _parts(loader: Any) -> Iterator[Any]:
    """Yields a data loader, and the nested streams inside it."""
    waiting = [loader]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        stream_part = waiting.pop()
        yield stream_part
        attributes = getattr(stream_part, "__dict__", {})
        waiting += [attributes[name] for name in _INNER if attributes.get(name) is not None]
        for inner_streams in map(attributes.get, _SEVERAL):
            if isinstance(inner_streams, (dict, list)):
                waiting += (
                    inner_streams.values() if isinstance(inner_streams, dict) else inner_streams
                )
