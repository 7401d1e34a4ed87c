"""Errors for data loaders that yield no batch, or fewer batches than their length, with fixes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from eventloop.errors import TaskError, a, counted

if TYPE_CHECKING:
    from eventloop.data.loaders import Loader

USED_UP = (
    "use an iterable that can be iterated again, such as a list or a DataLoader; an iterator or a "
    "generator is used up after one pass"
)


def too_few(name: str, num_batches: int, length: int | None) -> TaskError:
    """Returns the error for a data loader that ended before its length."""
    return TaskError(
        f"the {name} yielded {counted(num_batches, 'batch', 'batches')}, but its length is {length}",
        fix="don't raise StopIteration in the data set, which ends the data, and make len() of the data "
        "loader the number of batches that it yields",
    )


def no_batch_in_epoch(loader: Loader, epoch: int) -> TaskError:
    """Returns the error for a train data loader that yielded no batch in an epoch (from 0)."""
    return TaskError(
        f"the train data loader yielded no batch in epoch {epoch + 1}", fix=_why_no_batch(loader)
    )


def nothing_to_repeat(loader: Loader) -> TaskError:
    """Returns the error for a cycled data loader that ended without a batch."""
    name = a(type(loader.dataloader).__name__)
    return TaskError(f"cycled: {name} yielded no batch", fix=_why_no_batch(loader))


def _why_no_batch(loader: Loader) -> str:
    """Returns the fix: `drop_last` dropped all samples, or the iterable is used up."""
    for innermost_loader in loader.innermost():
        dataloader = innermost_loader.dataloader
        size = getattr(dataloader, "batch_size", None)
        if size is None or not getattr(dataloader, "drop_last", False):
            continue
        with suppress(TypeError):  # a sampler or a data set without a length
            sampler = getattr(dataloader, "sampler", None)
            num_samples = len(dataloader.dataset if sampler is None else sampler)
            if num_samples > 0:
                are_shared = ", divided over the ranks" if num_samples >= size else ""
                return (
                    f"drop_last=True drops a batch of fewer than {size} samples, and there are "
                    f"{num_samples}{are_shared}: use a smaller batch_size, or leave drop_last out"
                )
    return USED_UP
