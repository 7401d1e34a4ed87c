"""The callback: reports before training which samples of a stream resuming would lose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from eventloop import StateView, hookimpl
from eventloop_streaming.hf_streams import note_on, require_can_go_on


class Streaming:
    """Reports in the header how many train samples a stop in mid-epoch may lose or repeat.

    The state of a `datasets` stream excludes the samples in a shuffle buffer: a run that resumes in mid-epoch
    refills the buffer with later samples. After loading a state it has none until it yields (datasets 5.2).
    A `webdataset` stream has no state: its samples are read again, without a seed in another order
    (webdataset 1.0). A `litdata` loader with workers loses its epoch (litdata 0.2.76).
    """

    name = "streaming"

    def __init__(self) -> None:
        self._note = ""

    @hookimpl
    def init(self, state: StateView) -> None:
        """Inspects the train data loader."""
        loader = state.train_dataloader
        # Each worker of each rank has its own buffers.
        num_parts = max(1, getattr(loader, "num_workers", 0)) * state.data_world_size
        for doubt in (note_on, _of_litdata, _of_webdataset):
            self._note = self._note or doubt(loader, num_parts)

    @hookimpl
    def header_note(self) -> str:
        """Returns how many samples a stop in mid-epoch may lose or repeat."""
        return self._note

    @hookimpl
    def after_load(self, state: StateView) -> None:
        """Refuses to resume in mid-epoch where workers of `datasets` would raise an IndexError."""
        if state.clock.batch_in_epoch:
            require_can_go_on(state.train_dataloader)


def _of_litdata(loader: Any, num_parts: int) -> str:
    if not _is_of(loader, "litdata", "StreamingDataLoader") or not loader.num_workers:
        return ""
    num_lost = ""
    fix = "of an epoch"
    if _is_of(loader.dataset, "litdata", "StreamingDataset"):
        num_lost = f" {len(loader) * loader.batch_size:,}"
        fix = "of an epoch; eventloop_streaming.LitdataState(loader) in its place none"
    return (
        "data: a loader of `litdata` with workers forgets its epoch when it goes on in mid-epoch: a run that is stopped "
        f"again then loses and repeats up to all{num_lost} samples {fix}"
    )


def _of_webdataset(loader: Any, num_parts: int) -> str:
    data = getattr(loader, "dataset", loader)
    if not _is_of(data, "webdataset", "DataPipeline"):
        return ""
    sizes = list(_unseeded_buffers(data.pipeline))
    if not sizes:
        return ""
    num_lost = (
        "as many as the epoch has had" if None in sizes else f"up to {sum(sizes) * num_parts:,}"
    )
    return (
        "data: `webdataset` shuffles the train stream without a seed: a run that goes on in "
        f"mid-epoch reads its samples again in another order, and loses and repeats {num_lost}; "
        ".shuffle(size, seed=0) loses none"
    )


def _is_of(loader: Any, module: str, name: str) -> bool:
    """Whether an object is an instance of a module's class; False if the module isn't imported."""
    return module in sys.modules and isinstance(loader, getattr(sys.modules[module], name))


def _unseeded_buffers(pipeline: list[Any]) -> Iterator[Any]:
    """Yields the sizes of the shuffle buffers that are seeded by the time; None for a shuffle of shards.

    A buffer moves samples by at most its size; shuffled shards may move all samples.
    """
    names = [getattr(getattr(stage, "f", None), "__name__", "") for stage in pipeline]
    opened = names.index("tar_file_expander") if "tar_file_expander" in names else -1
    for idx, (stage, name) in enumerate(zip(pipeline, names, strict=True)):
        if name == "_shuffle" and stage.kw.get("seed") is None and stage.kw.get("rng") is None:
            size = stage.args[0] if stage.args else stage.kw.get("bufsize", 1_000)
            yield None if idx < opened else size
