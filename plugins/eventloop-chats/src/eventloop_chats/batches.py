"""Data sets of examples, and loaders of their batches: padded, in parts, or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eventloop.toolbox import Microbatches
from eventloop_chats.tokens import Example
from eventloop_packing import PackBatch, PackedDataset


class Documents(Dataset[dict[str, Tensor]]):
    """Examples as tensors: each is a mapping of `input_ids` and `labels`, int32."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = [
            {
                "input_ids": torch.tensor(one.input_ids, dtype=torch.int32),
                "labels": torch.tensor(one.labels, dtype=torch.int32),
            }
            for one in examples
        ]

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._examples)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """Returns one of them."""
        return self._examples[idx]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each has."""
        return [len(one["input_ids"]) for one in self._examples]


class PadBatch:
    """A collate function: a row for each document, padded to the longest of them.

    Batches are as those of `PackBatch`, with one document a row: what fills a row is document -1.
    """

    def __init__(self, pad_id: int) -> None:
        self._packs = PackBatch(pad_id, document_ids=True)

    def __call__(self, documents: Sequence[Any]) -> dict[str, Tensor]:
        """Returns int64 tensors, shape (B, T): input_ids, labels, position_ids, document_ids."""
        return self._packs([[one] for one in documents])


@dataclass(frozen=True)
class InParts:
    """A collate function that makes parts of a batch, each padded by itself."""

    collate_fn: Callable[[Sequence[Any]], Any]
    microbatch_size: int

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise ValueError(f"microbatch_size={self.microbatch_size!r} is less than 1")

    def __call__(self, samples: Sequence[Any]) -> Microbatches:
        """Returns parts of `microbatch_size` samples, the last may have fewer."""
        starts = range(0, len(samples), self.microbatch_size)
        return Microbatches(
            self.collate_fn(samples[at : at + self.microbatch_size]) for at in starts
        )


def num_tokens(batch: Mapping[str, Tensor]) -> int:
    """Returns how many tokens of a batch aren't padding."""
    return int((batch["document_ids"] >= 0).sum())


def batches_of(
    documents: Documents,
    *,
    pad_id: int,
    batch_size: int,
    microbatch_size: int | None = None,
    pack_into: int | None = None,
    **given: Any,
) -> DataLoader[Any]:
    """Returns a data loader.

    Args:
        batch_size: documents in a batch, or with `pack_into` rows.
        microbatch_size: rows in each part of a batch, which is padded by itself; None for one part.
        pack_into: documents are packed into rows of so many tokens; None for one a row.
        given: what else `DataLoader` takes.
    """
    collate_fn: Any = PadBatch(pad_id)
    dataset: Any = documents
    if pack_into is not None:
        dataset = PackedDataset(documents, pack_into, lengths=documents.lengths)
        collate_fn = PackBatch(pad_id, document_ids=True)
    if microbatch_size is not None:
        collate_fn = InParts(collate_fn, microbatch_size)
    return DataLoader(dataset, batch_size, collate_fn=collate_fn, **given)
