"""Data sets of examples, and loaders of their batches: padded, in microbatches, or packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eventloop.toolbox import Microbatches
from eventloop_llm.chats.tokens import Example
from eventloop_llm.packing import PackBatch, PackedDataset


class Documents(Dataset[dict[str, Tensor]]):
    """Examples as tensors: each is a mapping of `input_ids` and `labels`, int32."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = [
            {
                "input_ids": torch.tensor(example.input_ids, dtype=torch.int32),
                "labels": torch.tensor(example.labels, dtype=torch.int32),
            }
            for example in examples
        ]

    def __len__(self) -> int:
        """Returns the number of examples."""
        return len(self._examples)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """Returns a document."""
        return self._examples[idx]

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each document."""
        return [len(example["input_ids"]) for example in self._examples]


class PadBatch:
    """A collate function: a row for each document, padded to the longest of them.

    A batch has the tensors of `PackBatch`, with a single document in each row; padding is document -1.
    """

    def __init__(self, pad_id: int) -> None:
        self._packs = PackBatch(pad_id, document_ids=True)

    def __call__(self, documents: Sequence[Any]) -> dict[str, Tensor]:
        """Returns int64 tensors, shape (B, T): input_ids, labels, position_ids, document_ids."""
        return self._packs([[document] for document in documents])


@dataclass(frozen=True)
class InParts:
    """A collate function that splits a batch into microbatches, each padded separately."""

    collate_fn: Callable[[Sequence[Any]], Any]
    microbatch_size: int

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise ValueError(f"microbatch_size={self.microbatch_size!r} is less than 1")

    def __call__(self, samples: Sequence[Any]) -> Microbatches:
        """Returns microbatches of `microbatch_size` samples; the last may have fewer."""
        starts = range(0, len(samples), self.microbatch_size)
        return Microbatches(
            self.collate_fn(samples[start : start + self.microbatch_size]) for start in starts
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
    **options: Any,
) -> DataLoader[Any]:
    """Returns a data loader.

    Args:
        batch_size: number of documents in a batch; with `pack_into`, of rows.
        microbatch_size: number of rows in each separately padded microbatch; None for the whole batch.
        pack_into: packs documents into rows of this many tokens; None for a row per document.
        options: further arguments of `DataLoader`.
    """
    collate_fn: Any = PadBatch(pad_id)
    dataset: Any = documents
    if pack_into is not None:
        dataset = PackedDataset(documents, pack_into, lengths=documents.lengths)
        collate_fn = PackBatch(pad_id, document_ids=True)
    if microbatch_size is not None:
        collate_fn = InParts(collate_fn, microbatch_size)
    return DataLoader(dataset, batch_size, collate_fn=collate_fn, **options)
