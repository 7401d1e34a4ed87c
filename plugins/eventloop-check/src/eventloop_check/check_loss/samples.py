"""Selects and reorders samples of a batch, whatever its nesting of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import TaskError
from eventloop.toolbox import describe, num_samples


class CannotPickError(ValueError):
    """The samples of a batch can't be separated."""


class OnlyBatch:
    """A data loader of a single batch, which isn't distributed over ranks."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch])


def picked(batch: Any, chosen: Sequence[int]) -> Any:
    """Returns the batch with only the chosen samples, in the order given.

    Tensors are indexed along their first dimension, lists with an entry for each sample by entry;
    scalars and other values stay unchanged.

    Raises:
        CannotPickError: a tensor has a different number of samples, or the batch has no samples.
    """
    if not has_samples(batch):
        raise CannotPickError(f"a batch of {describe(batch)} has no samples that could be picked")
    return _picked(batch, chosen, num_samples(batch))


def has_samples(batch: Any) -> bool:
    """Whether the samples of a batch can be counted, and therefore selected."""
    if isinstance(batch, Mapping) and not batch:
        return False  # a run without a data loader; `num_samples` would return 1
    try:
        num_samples(batch)
    except TaskError:
        return False
    return True


def part_of_rank(samples: int, rank: int) -> range:
    """Returns the samples of a rank of two; both parts differ in size, as in the last batch of an epoch."""
    num_first_rank = samples // 2 + (samples > 2)
    return range(samples)[rank * num_first_rank : num_first_rank + rank * samples]


def _picked(value: Any, chosen: Sequence[int], samples: int) -> Any:
    if isinstance(value, Tensor):
        if value.ndim and len(value) != samples:
            raise CannotPickError(
                f"a batch of {samples} samples also has a tensor of shape {tuple(value.shape)}"
            )
        return value[torch.as_tensor(chosen, device=value.device)] if value.ndim else value
    if isinstance(value, Mapping):
        return {name: _picked(nested, chosen, samples) for name, nested in value.items()}
    if isinstance(value, list) and len(value) == samples and not _has_rows(value, samples):
        return [value[idx] for idx in chosen]
    if isinstance(value, tuple | list):
        selected = [_picked(nested, chosen, samples) for nested in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*selected)
        return tuple(selected) if isinstance(value, tuple) else selected
    if callable(getattr(value, "to", None)):
        raise CannotPickError(f"samples of {type(value).__name__} can't be picked")
    return value


def _has_rows(values: Sequence[Any], samples: int) -> bool:
    """Whether every entry of a list is a tensor with all samples."""
    return all(isinstance(value, Tensor) and value.shape[:1] == (samples,) for value in values)
