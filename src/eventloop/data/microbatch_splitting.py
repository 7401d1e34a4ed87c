"""Splits a batch into microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from eventloop.data.batches import (
    DifferentSizesError,
    is_list_of_entries,
    is_listed,
    is_of_one_sample,
    num_samples,
    rebuild,
    rows_of,
)
from eventloop.errors import TaskError, counted


def split(batch: Any, size: int) -> list[Any]:
    """Slices a nest along the leading dimension into microbatches of `size` samples.

    The last microbatch may be smaller. Tensors become views. A list is sliced if it has an entry for
    each sample: a plain value, a mapping, or a tensor of another size. All other values, including
    scalar tensors, are repeated in each microbatch.

    Raises:
        TaskError: two tensors have different numbers of samples.
    """
    try:
        samples = num_samples(batch)
    except DifferentSizesError as error:
        raise TaskError(
            f"a batch can't be split into microbatches of {size} samples: {error.what}",
            fix="unset microbatch_size, or implement the action split_batch; a single sample isn't a "
            "batch: let the data loader make batches, DataLoader(dataset, batch_size=32)",
        ) from None
    if samples <= size:
        return [batch]
    starts = range(0, samples, size)
    return [_piece(batch, start, min(start + size, samples), samples) for start in starts]


def split_side_by_side(batches: Mapping[str, Any], samples: int, size: int) -> list[dict[str, Any]]:
    """Slices the batches of several data loaders into the same number of microbatches.

    A microbatch has the same share of each batch, so that means over microbatches are weighted
    correctly. A batch without a tensor is repeated.

    Args:
        batches: a batch of each data loader, by name.
        samples: the number of samples of the first batch.
        size: the number of samples of the first batch in a microbatch; the last may have fewer.

    Raises:
        TaskError: a microbatch would end within a sample.
    """
    starts = range(0, samples, size)
    pieces: list[dict[str, Any]] = [{} for _ in starts]
    for name, batch in batches.items():
        num = rows_of(batch) or samples
        if size * num % samples:
            raise _uneven(batches, name, samples, num, size)
        for piece, start in zip(pieces, starts, strict=True):
            begin = start * num // samples
            end = min(start + size, samples) * num // samples
            piece[name] = _piece(batch, begin, end, num)
    return pieces


def _uneven(batches: Mapping[str, Any], name: str, samples: int, num: int, size: int) -> TaskError:
    step = math.lcm(
        *(samples // math.gcd(samples, rows_of(batch) or samples) for batch in batches.values())
    )
    is_whole_batch = step == samples
    return TaskError(
        f"a batch of {counted(samples, 'sample')} with {num} of {name!r} can't be split into microbatches of "
        f"{size}: one would end within a sample of {name!r}",
        fix=(
            "unset microbatch_size"
            if is_whole_batch
            else f"set microbatch_size to a multiple of {step}"
        )
        + ", give data loaders with drop_last=True where the last batch is smaller, or implement the "
        "action split_batch",
    )


def _piece(batch: Any, start: int, stop: int, samples: int) -> Any:
    if is_listed(batch):
        return rebuild(batch, [values[start:stop] for values in batch])
    return _slice(batch, start, stop, samples)


def _slice(batch: Any, start: int, stop: int, samples: int) -> Any:
    if isinstance(batch, Tensor):
        if batch.is_nested:  # torch 2.13 can't slice it along its parts
            raise TaskError(
                "a batch with a nested tensor can't be split into microbatches",
                fix="unset microbatch_size, and let the data loader make the microbatches: "
                "DataLoader(..., collate_fn=collated(collate, microbatch_size=8)), of eventloop.data",
            )
        if batch.ndim and batch.shape[0] != samples:
            raise TaskError(
                f"a batch of {counted(samples, 'sample')} can't be split: it also holds a tensor of shape "
                f"{tuple(batch.shape)}",
                fix="unset microbatch_size, or implement the action split_batch",
            )
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {key: _slice(value, start, stop, samples) for key, value in batch.items()}
    # torch collates texts into a tuple.
    is_texts = type(batch) is tuple and all(isinstance(value, str) for value in batch)
    of_samples = is_texts or (isinstance(batch, list) and all(map(is_of_one_sample, batch)))
    if (of_samples and len(batch) == samples) or is_list_of_entries(batch, samples):
        return batch[start:stop]
    if isinstance(batch, (tuple, list)):
        return rebuild(batch, [_slice(value, start, stop, samples) for value in batch])
    return batch
