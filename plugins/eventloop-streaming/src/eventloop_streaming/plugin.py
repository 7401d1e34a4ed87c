"""The callback: says before training what a resumed run would lose of streams that keep no position."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from eventloop import StateView, hookimpl


class Streaming:
    """Warns in the header of a train stream that `datasets` or `webdataset` shuffle in a buffer.

    The state of a stream of `datasets` has no samples of the buffer: a run that goes on in mid-epoch
    fills it anew, behind those that it held (datasets 5.2). One of `webdataset` has no state: its
    samples are read again, and without a seed their order is another one (webdataset 1.0).
    """

    name = "streaming"

    def __init__(self) -> None:
        self.note = ""

    @hookimpl
    def init(self, state: StateView) -> None:
        """Looks at the train data loader."""
        sizes = list(_lossy_buffers(state.train_dataloader))
        if sizes:
            self.note = (
                f"data: `datasets` shuffle the train stream in a buffer of {max(sizes):,} samples that "
                f"isn't saved: a run that goes on in mid-epoch loses up to {sum(sizes):,}; "
                "eventloop_streaming.Shuffled(stream, buffer_size) in its place loses none"
            )
        elif _has_inexact_workers(state.train_dataloader):
            self.note = (
                "data: `litdata` with several workers doesn't go on at the very sample: a run that goes on "
                "in mid-epoch may lose and repeat some batches of each worker; with num_workers=0 none"
            )
        elif _has_unseeded_shuffle(state.train_dataloader):
            self.note = (
                "data: `webdataset` shuffles the train stream without a seed: a run that goes on in "
                "mid-epoch reads its samples again in another order, and may lose and repeat as many as "
                "the epoch has had; .shuffle(size, seed=0) loses none"
            )


def _has_inexact_workers(dataloader: Any) -> bool:
    """Returns whether a loader is litdata's, with workers whose positions it rounds (0.2.76)."""
    module = sys.modules.get("litdata")
    if module is None or not isinstance(dataloader, module.StreamingDataLoader):
        return False
    return bool(dataloader.num_workers > 1)


def _has_unseeded_shuffle(dataloader: Any) -> bool:
    """Returns whether a stream of `webdataset` is shuffled by a generator that the time seeds."""
    module = sys.modules.get("webdataset")
    data = getattr(dataloader, "dataset", dataloader)
    if module is None or not isinstance(data, module.DataPipeline):
        return False
    return any(
        getattr(getattr(stage, "f", None), "__name__", "") == "_shuffle"
        and stage.kw.get("seed") is None
        and stage.kw.get("rng") is None
        for stage in data.pipeline
    )


def _lossy_buffers(dataloader: Any) -> Iterator[int]:
    """Yields the sizes of the shuffle buffers that a data loader over a stream of `datasets` has."""
    module = sys.modules.get("datasets")
    data = getattr(dataloader, "dataset", dataloader)
    if module is None or not isinstance(data, module.IterableDataset):
        return
    # Private: there is no public way to ask (datasets 5.2).
    waiting: list[Any] = [getattr(data, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            yield int(part.buffer_size)
        waiting += [inner for inner in _inner(part) if inner is not None]
        if len(waiting) > 1_000:
            return


def _inner(part: Any) -> list[Any]:
    return [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or [])]
