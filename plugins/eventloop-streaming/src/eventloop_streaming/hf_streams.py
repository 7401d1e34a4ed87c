"""What resuming in mid-epoch loses of a `datasets` stream, and when it fails (datasets 5.2)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from eventloop import TaskError

_MOST_PARTS = 1_000
# Of `datasets` private: there is no public way to ask (5.2). The others are of streams of this package.
_INNER = ("dataset", "_ex_iterable", "ex_iterable", "_source", "_own")
_SEVERAL = ("ex_iterables", "_sources")


def note_on(loader: Any, num_parts: int) -> str:
    """Returns the header's note on resuming with a data loader; empty if nothing is lost.

    Args:
        loader: over a stream of `datasets`, or anything else.
        num_parts: how many workers of all ranks have a buffer of their own.
    """
    num_workers = getattr(loader, "num_workers", 0)
    if (stuck := _stuck(loader)) is not None:
        return (
            f"data: {stuck}: a run can't go on in mid-epoch, only from the end of an epoch; {_INSTEAD} can, "
            "and loses no sample"
        )
    sizes = [part.buffer_size for part in _parts(loader) if _is(part, "BufferShuffled")]
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
    """Returns why workers would end in an IndexError of `datasets`; None if they wouldn't.

    A worker loads the state of its own shards into the whole stream first, which has more of them.
    """
    num_workers = getattr(loader, "num_workers", 0)
    streams = [part for part in _parts(loader) if _is_stream(part)]
    if num_workers < 2 or not streams or not sys.modules["datasets"].__version__.startswith("5.2."):
        return None
    for part in _parts(loader):
        if _is(part, "InterleavedShards"):
            # Of a rank, where ranks share the shards.
            num_shards = min([part.num_shards, *(stream.num_shards for stream in streams)])
            at_once = min(num_shards, part.max_input_shards)
            if max(1, num_shards // num_workers) < at_once:
                return (
                    f"`datasets` {sys.modules['datasets'].__version__} can't load the state of a stream that is shuffled from "
                    f"{at_once} shards at once (max_buffer_input_shards) where one of {num_workers} workers has fewer"
                )
    return None


def _is_stream(data: Any) -> bool:
    return "datasets" in sys.modules and isinstance(data, sys.modules["datasets"].IterableDataset)


def _is(part: Any, name: str) -> bool:
    return type(part).__name__ == f"{name}ExamplesIterable"


def _parts(loader: Any) -> Iterator[Any]:
    """Yields a data loader, and what streams it is made of."""
    waiting = [loader]
    for _ in range(_MOST_PARTS):
        if not waiting:
            return
        part = waiting.pop()
        yield part
        attributes = getattr(part, "__dict__", {})
        waiting += [attributes[name] for name in _INNER if attributes.get(name) is not None]
        for several in map(attributes.get, _SEVERAL):
            if isinstance(several, (dict, list)):
                waiting += several.values() if isinstance(several, dict) else several
