"""Data that are tensors in memory: a batch is read with one gather, not sample by sample."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)


def tensors(
    *arrays: Any, batch_size: int, shuffle: bool = False, drop_last: bool = False
) -> DataLoader[Any]:
    """Returns a data loader over arrays that lie in memory.

    Args:
        arrays: tensors, NumPy arrays or lists of numbers, a sample per row: `tensors(x, y, ...)` for
            batches `[x, y]`; one mapping of them for batches that are mappings. They aren't copied.
        batch_size: samples per batch.
        shuffle: whether each epoch has an order of its own.
        drop_last: whether a last, smaller batch is left out.

    Raises:
        ValueError: there is no array, or they differ in length.
    """
    named = arrays[0] if len(arrays) == 1 and isinstance(arrays[0], Mapping) else None
    columns = [torch.as_tensor(one) for one in (arrays if named is None else named.values())]
    lengths = [len(one) if one.ndim else None for one in columns]
    if not columns or None in lengths or len(set(lengths)) > 1:
        shapes = ", ".join(str(tuple(one.shape)) for one in columns) or "none"
        raise ValueError(f"tensors() takes arrays with as many rows each, got shapes: {shapes}")
    dataset: Any = TensorDataset(*columns)
    if named is not None:
        dataset = StackDataset(**dict(zip(named, columns, strict=True)))
    return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)


def gathering(dataset: Any, collate_fn: Any) -> tuple[Any, Any]:
    """Returns a data set and a collate function that make the same batches, with one gather each.

    A data set that isn't made of tensors alone, or has another collate function, stays as it is.
    """
    if collate_fn is not default_collate or not _is_gatherable(dataset):
        return dataset, collate_fn
    return GatheredDataset(dataset), collate_gathered


class StandIn:
    """Wraps a map-style data set; attributes that aren't among its `own` are the data set's."""

    __slots__ = ("_dataset",)

    def __init__(self, dataset: Any, **own: Any) -> None:
        for name, value in {"_dataset": dataset, **own}.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]


class GatheredDataset(StandIn):
    """Tensors in memory that are read a batch at a time."""

    __slots__ = ()

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Returns a batch; the list of samples if an index isn't an int, or is out of range."""
        try:
            if set(map(type, indices)) == {int} and _is_gatherable(self._dataset):
                return Gathered(_gather(self._dataset, indices))
        except (LookupError, OverflowError, RuntimeError, TypeError, ValueError):
            pass  # reading sample by sample raises torch's own error
        return [self._dataset[index] for index in indices]


class Gathered(NamedTuple):
    """A batch that needs no collate function."""

    batch: Any


def collate_gathered(samples: Any) -> Any:
    """Makes a batch, as `default_collate` does, of what isn't one already."""
    return samples.batch if type(samples) is Gathered else default_collate(samples)


def _is_gatherable(dataset: Any) -> bool:
    kind = type(dataset)
    if kind is Tensor:
        # Stacking the rows of any other tensor has other strides or gradients.
        strided = dataset.layout == torch.strided and not dataset.is_nested
        return bool(strided and dataset.ndim and dataset.is_contiguous()) and not (
            dataset.requires_grad or dataset.is_conj() or dataset.is_neg()
        )
    parts = dataset.tensors if kind is TensorDataset else parts_of(dataset)
    return bool(parts) and all(map(_is_gatherable, parts))


def parts_of(dataset: Any) -> Sequence[Any]:
    """Returns the data sets that one of torch's own is made of; [] of any other."""
    if type(dataset) is Subset:
        return [dataset.dataset]
    parts = dataset.datasets if type(dataset) in (ConcatDataset, StackDataset) else []
    return list(parts.values()) if isinstance(parts, Mapping) else parts


def datasets_of(dataset: Any) -> list[Any]:
    """Returns a data set and those that it is made of, if it is one of torch's own wrappers."""
    return [dataset, *itertools.chain.from_iterable(map(datasets_of, parts_of(dataset)))]


def _gather(dataset: Any, indices: Sequence[int]) -> Any:
    """Returns what `default_collate` makes of the samples of these indices."""
    if min(indices) < 0:
        raise IndexError  # `index_select` doesn't count from the end
    kind = type(dataset)
    if kind is Subset:
        return _gather(dataset.dataset, [dataset.indices[one] for one in indices])
    if kind is ConcatDataset:
        return _gather_parts(dataset, indices)
    rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
    if kind is Tensor:
        return dataset.index_select(0, rows.to(dataset.device))
    parts = dataset.tensors if kind is TensorDataset else parts_of(dataset)
    columns = [
        one.index_select(0, rows.to(one.device)) if type(one) is Tensor else _gather(one, indices)
        for one in parts
    ]
    if kind is StackDataset and isinstance(dataset.datasets, Mapping):
        return dict(zip(dataset.datasets, columns, strict=True))
    return columns


def _gather_parts(dataset: ConcatDataset[Any], indices: Sequence[int]) -> Any:
    firsts = [0, *dataset.cumulative_sizes]
    rows_of: dict[int, list[int]] = {}
    for row, one in enumerate(indices):
        rows_of.setdefault(bisect.bisect_right(firsts, one) - 1, []).append(row)
    batches = [
        _gather(dataset.datasets[part], [indices[row] - firsts[part] for row in rows])
        for part, rows in rows_of.items()
    ]
    order = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
    return batches[0] if len(batches) == 1 else _joined(batches, order)


def _joined(batches: list[Any], order: Tensor) -> Any:
    """Concatenates batches of the same structure, and reorders the rows."""
    if isinstance(batches[0], Tensor):
        return torch.cat(batches)[order.to(batches[0].device)]
    if isinstance(batches[0], dict):
        return {key: _joined([one[key] for one in batches], order) for key in batches[0]}
    return [_joined(list(column), order) for column in zip(*batches, strict=True)]
