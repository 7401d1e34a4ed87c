"""Pairs of answers as tokens, and their batches: for methods that learn from preferences."""

# B = row of a batch, K = document of a row, T = token

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eventloop_llm.chats.documents import Documents, InParts, PadBatch
from eventloop_llm.chats.tokens import Conversations, Example, made_of_rows

# The tensors of a batch whose shape is (B, K, T).
DOCUMENTS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True)
class Pair:
    """Two documents, such as a chosen and a rejected answer, each with its prompt.

    Args:
        numbers: further numbers of the row, such as a margin.
    """

    first: Example
    second: Example
    numbers: Mapping[str, float] = field(default_factory=dict)


class Pairs(Dataset[dict[str, Any]]):
    """Pairs as tensors.

    Args:
        pairs: pairs whose `numbers` have the same names.
        first_number: number of the first row; set it where several datasets need distinct row numbers.
    """

    def __init__(self, pairs: Sequence[Pair], first_number: int = 0) -> None:
        self._documents = Documents([doc for pair in pairs for doc in (pair.first, pair.second)])
        self._numbers = [
            {"number": first_number + idx, **pair.numbers} for idx, pair in enumerate(pairs)
        ]

    def __len__(self) -> int:
        """Returns the number of pairs."""
        return len(self._numbers)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Returns the two documents of a pair, and its numbers."""
        documents = [self._documents[2 * idx], self._documents[2 * idx + 1]]
        return {"documents": documents, "numbers": self._numbers[idx]}

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens, to check that stored log-probabilities belong to this data."""
        digest = hashlib.sha256()
        for idx in range(len(self._documents)):
            for tensor in self._documents[idx].values():
                digest.update(tensor.numpy().tobytes() + b"|")
        return digest.hexdigest()


class PairBatch:
    """A collate function; all documents are padded to the longest in the batch."""

    def __init__(self, pad_id: int) -> None:
        self._pad = PadBatch(pad_id)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Returns int64 tensors of shape (B, K, T), and numbers of shape (B,)."""
        padded = self._pad([doc for row in rows for doc in row["documents"]])
        batch = {
            name: tensor.view(len(rows), -1, tensor.shape[1]) for name, tensor in padded.items()
        }
        names = rows[0]["numbers"]
        return batch | {
            name: torch.tensor([row["numbers"][name] for row in rows]) for name in names
        }


def pair_batches_of(
    pairs: Pairs,
    *,
    pad_id: int,
    batch_size: int,
    microbatch_size: int | None = None,
    **options: Any,
) -> DataLoader[Any]:
    """Returns a data loader of pairs; with `microbatch_size` each microbatch is padded separately."""
    collate_fn: Any = PairBatch(pad_id)
    if microbatch_size is not None:
        collate_fn = InParts(collate_fn, microbatch_size)
    return DataLoader(pairs, batch_size, collate_fn=collate_fn, **options)


def pairs_of(
    rows: Sequence[Mapping[str, Any]], name: str, conversations: Conversations
) -> list[Pair]:
    """Makes pairs of rows with prompt, chosen and rejected, or with two chats that begin alike.

    If a row has a margin, it becomes a number of the pair.

    Raises:
        TaskError: a row can't be used.
    """
    has_margins = any("margin" in row for row in rows)

    def make(row: Mapping[str, Any]) -> Pair:
        chosen, rejected = map(conversations, chosen_and_rejected(row))
        numbers = {"margin": float(row.get("margin", 0.0))} if has_margins else {}
        return Pair(chosen, rejected, numbers)

    return made_of_rows(rows, name, make)


def chosen_and_rejected(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a row of a pair into two rows of prompt and completion."""
    if "chosen" not in row or "rejected" not in row:
        raise ValueError(
            f"it has {', '.join(map(repr, row)) or 'nothing'}; give prompt, chosen and rejected"
        )
    prompt = row.get("prompt")
    chosen = row["chosen"]
    rejected = row["rejected"]
    if prompt is None:
        if isinstance(chosen, str):
            raise ValueError("chosen is a text, and there is no prompt")
        num = _num_common_messages(chosen, rejected)
        prompt = chosen[:num]
        chosen = chosen[num:]
        rejected = rejected[num:]
    tools = {"tools": row["tools"]} if "tools" in row else {}
    return (
        {"prompt": prompt, "completion": chosen} | tools,
        {"prompt": prompt, "completion": rejected} | tools,
    )


def _num_common_messages(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Returns the number of leading messages that both chats share, excluding the last message, the answer."""
    for idx, (chosen_message, rejected_message) in enumerate(zip(chosen, rejected, strict=False)):
        if chosen_message != rejected_message:
            return idx
    return min(len(chosen), len(rejected)) - 1


def num_rows(batch: Mapping[str, Tensor]) -> int:
    """Returns the number of rows over which the loss of a microbatch is averaged."""
    return len(batch["number"])
