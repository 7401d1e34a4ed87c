"""Data sets of tensors in memory: a batch is read with one gather instead of sample by sample."""

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
    """Returns a data loader over arrays in memory.

    Args:
        arrays: tensors, NumPy arrays or lists of numbers, a sample per row: `tensors(x, y, ...)` for
            batches `[x, y]`; a single mapping for batches that are mappings. They aren't copied.
        batch_size: samples per batch.
        shuffle: whether to shuffle the samples in each epoch.
        drop_last: whether to leave out a last, smaller batch.

    Raises:
        ValueError: there is no array, or the arrays differ in length.
    """
    named = arrays[0] if len(arrays) == 1 and isinstance(arrays[0], Mapping) else None
    columns = [torch.as_tensor(column) for column in (arrays if named is None else named.values())]
    lengths = [len(column) if column.ndim else None for column in columns]
    if not columns or None in lengths or len(set(lengths)) > 1:
        shapes = ", ".join(str(tuple(column.shape)) for column in columns) or "none"
        raise ValueError(f"tensors() takes arrays with equal numbers of rows, got shapes: {shapes}")
    dataset: Any = TensorDataset(*columns)
    if named is not None:
        dataset = StackDataset(**dict(zip(named, columns, strict=True)))
    return DataLoader(dataset, batch_size, shuffle=shuffle, drop_last=drop_last)


def gathering(dataset: Any, collate_fn: Any) -> tuple[Any, Any]:
    """Returns a data set and a collate function that make the same batches with one gather each.

    Both are returned unchanged if the data set doesn't consist of tensors, or if the collate function
    isn't torch's default.
    """
    if collate_fn is not default_collate or not _is_gatherable(dataset):
        return dataset, collate_fn
    return GatheredDataset(dataset), collate_gathered


class StandIn:
    """Wraps a map-style data set; other attributes than the given ones are the data set's."""

    __slots__ = ("_dataset",)

    def __init__(self, dataset: Any, **attributes: Any) -> None:
        for name, value in {"_dataset": dataset, **attributes}.items():
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
    """A data set of tensors in memory that reads a batch at a time."""

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
    """A batch that is already collated."""

    batch: Any


def collate_gathered(samples: Any) -> Any:
    """Collates samples as `default_collate` does; returns the batch of a `Gathered`."""
    return samples.batch if type(samples) is Gathered else default_collate(samples)


def _is_gatherable(dataset: Any) -> bool:
    kind = type(dataset)
    if kind is Tensor:
        # For any other tensor, stacking the rows gives other strides or gradients than a gather.
        strided = dataset.layout == torch.strided and not dataset.is_nested
        return bool(strided and dataset.ndim and dataset.is_contiguous()) and not (
            dataset.requires_grad or dataset.is_conj() or dataset.is_neg()
        )
    components = dataset.tensors if kind is TensorDataset else parts_of(dataset)
    return bool(components) and all(map(_is_gatherable, components))


def parts_of(dataset: Any) -> Sequence[Any]:
    """Returns the data sets inside one of torch's wrappers; [] for any other data set."""
    if type(dataset) is Subset:
        return [dataset.dataset]
    datasets = dataset.datasets if type(dataset) in (ConcatDataset, StackDataset) else []
    return list(datasets.values()) if isinstance(datasets, Mapping) else datasets


def datasets_of(dataset: Any) -> list[Any]:
    """Returns a data set and, if it is one of torch's wrappers, all data sets inside it."""
    return [dataset, *itertools.chain.from_iterable(map(datasets_of, parts_of(dataset)))]


def _gather(dataset: Any, indices: Sequence[int]) -> Any:
    """Returns the same batch as `default_collate` of the samples at these indices."""
    if min(indices) < 0:
        raise IndexError  # `index_select` doesn't support negative indices
    kind = type(dataset)
    if kind is Subset:
        return _gather(dataset.dataset, [dataset.indices[index] for index in indices])
    if kind is ConcatDataset:
        return _gather_parts(dataset, indices)
    rows = torch.frombuffer(array("q", indices), dtype=torch.int64)
    if kind is Tensor:
        return dataset.index_select(0, rows.to(dataset.device))
    columns_or_datasets = dataset.tensors if kind is TensorDataset else parts_of(dataset)
    columns = [
        index.index_select(0, rows.to(index.device))
        if type(index) is Tensor
        else _gather(index, indices)
        for index in columns_or_datasets
    ]
    if kind is StackDataset and isinstance(dataset.datasets, Mapping):
        return dict(zip(dataset.datasets, columns, strict=True))
    return columns


def _gather_parts(dataset: ConcatDataset[Any], indices: Sequence[int]) -> Any:
    firsts = [0, *dataset.cumulative_sizes]
    rows_of: dict[int, list[int]] = {}
    for row, index in enumerate(indices):
        rows_of.setdefault(bisect.bisect_right(firsts, index) - 1, []).append(row)
    batches = [
        _gather(dataset.datasets[dataset_idx], [indices[row] - firsts[dataset_idx] for row in rows])
        for dataset_idx, rows in rows_of.items()
    ]
    order = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
    return batches[0] if len(batches) == 1 else _joined(batches, order)


def _joined(batches: list[Any], order: Tensor) -> Any:
    """Concatenates batches of the same structure, and reorders the rows."""
    if isinstance(batches[0], Tensor):
        return torch.cat(batches)[order.to(batches[0].device)]
    if isinstance(batches[0], dict):
        return {key: _joined([batch[key] for batch in batches], order) for key in batches[0]}
    return [_joined(list(column), order) for column in zip(*batches, strict=True)]
