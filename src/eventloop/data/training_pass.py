"""A separate pass over the training data, which doesn't change the run's position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eventloop.data.batches import mover_to
from eventloop.data.iterable_sources import restored_loader_state
from eventloop.data.loaders import loader_of
from eventloop.errors import TaskError
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    import torch

    from eventloop.distributed.processes import Processes


@contextmanager
def training_pass(
    dataloader: Any, processes: Processes, device: torch.device, *, seed: int, epoch: int
) -> Iterator[Iterator[Any]]:
    """Yields this rank's batches of an epoch, on the device; see `State.training_pass`.

    Args:
        dataloader: the run's data loader; its generators, samplers and position don't change.
        processes: the ranks, each with its own loader.
        device: the device to move batches to.
        seed: the seed for the random draws of a data set.
        epoch: the number of the epoch, on which these draws depend, too.

    Raises:
        TaskError: the data loader's position would be lost.
    """
    loader = loader_of(dataloader)
    source = loader.source(processes, seed)
    if source.is_stateful or not source.suits_any_ranks or loader.is_endless:
        raise TaskError(
            f"a {type(dataloader).__name__} can't be iterated over during training: its position "
            "would be lost",
            fix="use a list of batches, or a DataLoader over a map-style data set",
        )
    move = mover_to(device)

    def batches() -> Iterator[Any]:
        # Workers start with the first batch, and end with the iterator.
        yield from map(move, source.batches(epoch))

    with kept_generators(), restored_loader_state(dataloader):
        yield batches()
