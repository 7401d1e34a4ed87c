"""How batches are read from a data loader: as a run's source, and in a pass apart from the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from eventloop.data.batches import mover_to
from eventloop.data.combined import Cycled, FirstBatches, NoData, Zipped, is_endless, is_map_style
from eventloop.data.iterable_sources import IterableSource, restored_loader_state
from eventloop.data.map_style import MapStyleSource
from eventloop.data.resumable_sources import (
    CycledSource,
    ListSource,
    Source,
    StatefulSource,
    ZippedSource,
)
from eventloop.data.sample_seeds import seed_of_part
from eventloop.data.sampler_state import Stateful
from eventloop.errors import TaskError
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    import torch

    from eventloop.distributed.processes import Processes


def source_of(dataloader: Any, processes: Processes, sample_seed: int | None) -> Source:
    """Returns the source of a data loader's kind.

    Args:
        dataloader: any iterable of batches.
        processes: the ranks, each with a loader of its own.
        sample_seed: what the draws of a map-style data set are tied to; None leaves them alone.
    """
    if isinstance(dataloader, FirstBatches):
        source = source_of(dataloader.dataloader, processes, sample_seed)
        source.limit = dataloader.limit
        return source
    if isinstance(dataloader, Cycled):
        return CycledSource(dataloader, source_of(dataloader.dataloader, processes, sample_seed))
    if isinstance(dataloader, Zipped):
        sources = {}
        for idx, (name, one) in enumerate(dataloader.parts.items()):
            seed = None if sample_seed is None else seed_of_part(sample_seed, idx)
            sources[name] = source_of(one, processes, seed)
        return ZippedSource(dataloader, sources)
    is_loader = isinstance(dataloader, DataLoader)
    # torchdata's loader seeks if its data set is stateful; else it reads from the start, and may
    # miscount when it does so twice (0.11).
    is_stateful = isinstance(dataloader, Stateful)
    if is_stateful and (not is_loader or isinstance(dataloader.dataset, Stateful)):
        return StatefulSource(dataloader)
    if is_map_style(dataloader):
        return MapStyleSource(dataloader, processes, sample_seed)
    if isinstance(dataloader, Sequence):
        return ListSource(dataloader)
    return Source(dataloader) if isinstance(dataloader, NoData) else IterableSource(dataloader)


@contextmanager
def training_pass(
    dataloader: Any, processes: Processes, device: torch.device, *, seed: int, epoch: int
) -> Iterator[Iterator[Any]]:
    """Yields this rank's batches of an epoch, on the device; see `State.training_pass`.

    Args:
        dataloader: the run's; its generators, samplers and position don't change.
        processes: the ranks, each with a loader of its own.
        device: where batches go.
        seed: what random draws of a data set are tied to.
        epoch: its number, which they are tied to as well.

    Raises:
        TaskError: the data loader's position would be lost.
    """
    source = source_of(dataloader, processes, seed)
    if source.is_stateful or not source.suits_any_ranks or is_endless(dataloader):
        raise TaskError(
            f"a {type(dataloader).__name__} can't be iterated over during training: its position "
            "would be lost",
            fix="give a list of batches, or a DataLoader over a map-style data set",
        )
    move = mover_to(device)

    def batches() -> Iterator[Any]:
        # Workers start with the first batch, and end with the iterator.
        yield from map(move, source.batches(epoch))

    with kept_generators(), restored_loader_state(dataloader):
        yield batches()
