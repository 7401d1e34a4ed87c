"""Some samples of a batch, in another order too, whatever nest of tensors the batch is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import TaskError
from eventloop.toolbox import describe, num_samples


class CannotPickError(ValueError):
    """The samples of a batch can't be told apart."""


class OnlyBatch:
    """A data loader of one batch, which isn't shared out among ranks."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch])


def picked(batch: Any, chosen: Sequence[int]) -> Any:
    """Returns the batch with these of its samples, in this order.

    Tensors are indexed along their first dimension, lists with an entry for each sample by entry;
    scalars and other values stay.

    Raises:
        CannotPickError: a tensor has another number of samples, or there is none.
    """
    if not has_samples(batch):
        raise CannotPickError(f"a batch of {describe(batch)} has no samples that could be picked")
    return _picked(batch, chosen, num_samples(batch))


def has_samples(batch: Any) -> bool:
    """Returns whether a batch has samples that can be counted, and with that picked."""
    if isinstance(batch, Mapping) and not batch:
        return False  # of a run without a data loader; it counts as one
    try:
        num_samples(batch)
    except TaskError:
        return False
    return True


def part_of_rank(samples: int, rank: int) -> range:
    """Returns the samples of a rank of two; the parts differ in size, as at the end of an epoch."""
    first = samples // 2 + (samples > 2)
    return range(samples)[rank * first : first + rank * samples]


def _picked(value: Any, chosen: Sequence[int], samples: int) -> Any:
    if isinstance(value, Tensor):
        if value.ndim and len(value) != samples:
            raise CannotPickError(
                f"a batch of {samples} samples also has a tensor of shape {tuple(value.shape)}"
            )
        return value[torch.as_tensor(chosen, device=value.device)] if value.ndim else value
    if isinstance(value, Mapping):
        return {name: _picked(one, chosen, samples) for name, one in value.items()}
    if isinstance(value, list) and len(value) == samples and not _has_rows(value, samples):
        return [value[idx] for idx in chosen]
    if isinstance(value, tuple | list):
        parts = [_picked(one, chosen, samples) for one in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return tuple(parts) if isinstance(value, tuple) else parts
    if callable(getattr(value, "to", None)):
        raise CannotPickError(f"samples of {type(value).__name__} can't be picked")
    return value


def _has_rows(values: Sequence[Any], samples: int) -> bool:
    """Returns whether a list is of tensors that each have all samples."""
    return all(isinstance(one, Tensor) and one.shape[:1] == (samples,) for one in values)
