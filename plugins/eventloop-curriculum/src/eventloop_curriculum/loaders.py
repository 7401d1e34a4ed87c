"""Data loaders like another one, but for the size of their batches or the length of sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from eventloop.toolbox import map_tensors

_ARGUMENTS = ("num_workers", "pin_memory", "drop_last", "timeout", "worker_init_fn",
         "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
         "in_order")  # fmt: skip


def remade(
    dataloader: DataLoader[Any], *, batch_size: int | None = None, seq_len: int | None = None
) -> DataLoader[Any]:
    """Makes a data loader of the same class over the same data set, with the same sampler.

    Args:
        dataloader: makes batches of its sampler's samples; stays as it is.
        batch_size: samples a batch; not set: as many as before.
        seq_len: how long sequences may be, see `shortened`; not set: as long as they are.

    Raises:
        ValueError: it makes no batches of a size that could be changed.
        TypeError: its class isn't made as a `DataLoader` is.
    """
    if dataloader.batch_size is None:
        raise ValueError("its batches are made by the data set or by a batch sampler")
    arguments = {name: getattr(dataloader, name) for name in _ARGUMENTS}
    if not isinstance(dataloader.dataset, IterableDataset):
        arguments["sampler"] = dataloader.sampler
    collate_fn = dataloader.collate_fn
    return type(dataloader)(
        dataloader.dataset,
        batch_size=dataloader.batch_size if batch_size is None else batch_size,
        collate_fn=collate_fn if seq_len is None else Shortened(collate_fn, seq_len),
        **arguments,
    )


class Shortened:
    """A collate function that truncates sequences; an object, so that workers can receive it.

    Args:
        collate_fn: makes a batch of a list of samples.
        seq_len: how long sequences may be.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], seq_len: int) -> None:
        self.collate_fn = collate_fn
        self.seq_len = seq_len

    def __call__(self, samples: list[Any]) -> Any:
        """Makes a batch, and cuts it."""
        return shortened(self.collate_fn(samples), self.seq_len)


def shortened(batch: Any, seq_len: int) -> Any:
    """Cuts the sequences of a batch, from the end.

    The second dimension of the first tensor that has one is the sequence's; so is that of every
    other tensor where it is as long. Anything else stays as it is.

    Args:
        batch: a nest of tensors of shape (num_samples, length, ...).
        seq_len: how long they may be.
    """
    length = next((one.shape[1] for one in _tensors(batch) if one.ndim > 1), 0)

    def cut(value: Any) -> Any:
        is_sequence = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == length
        return value[:, :seq_len] if is_sequence else value

    return map_tensors(cut, batch) if length > seq_len else batch


def _tensors(nest: Any) -> Iterator[Tensor]:
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list, Mapping)):
        for value in nest.values() if isinstance(nest, Mapping) else nest:
            yield from _tensors(value)
