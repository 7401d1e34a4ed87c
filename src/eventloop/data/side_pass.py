"""A pass over the training data beside the run, of which the run notices nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from eventloop.data.combine import innermost, is_endless
from eventloop.data.loaders import source_of
from eventloop.data.prefetch import mover_to
from eventloop.data.sample_order import samplers_of
from eventloop.errors import TaskError
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    import torch

    from eventloop.distributed.processes import Processes


@contextmanager
def pass_beside(
    dataloader: Any, processes: Processes, device: torch.device, *, seed: int, epoch: int
) -> Iterator[Iterator[Any]]:
    """Yields the batches of an epoch of this rank, on the device; see `State.training_pass`.

    Args:
        seed: what random draws of a data set are tied to, so that its own generators don't move.
        epoch: what they are tied to as well.

    Raises:
        TaskError: the data loader's position would be lost.
    """
    source = source_of(dataloader, processes, seed)
    if not source.suits_any_ranks or is_endless(dataloader):
        raise TaskError(
            f"a {type(dataloader).__name__} can't be iterated over during training: its place "
            "would be lost",
            fix="give a list of batches, or a DataLoader over a map-style data set",
        )
    kept = [
        (one, dict(vars(one)))
        for loader in innermost(dataloader)
        for one in samplers_of(
            getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None)
        )
        if hasattr(one, "__dict__")
    ]
    standing = source.state_dict(None)
    with kept_generators():
        try:
            # Workers start with the first batch, and end with the iterator.
            move = mover_to(device)
            yield (move(batch) for _ in range(1) for batch in source.start(epoch))
        finally:
            for sampler, attributes in kept:
                vars(sampler).update(attributes)
            source.load(standing, epoch, None)
