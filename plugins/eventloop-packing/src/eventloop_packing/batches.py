"""Batches of packs: rows of token ids, with labels and positions of their documents."""

# B = row of a batch, T = token of a row, L = token of a document

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# What a document may have; a mask of ones says nothing.
_KEYS = {"input_ids", "labels", "attention_mask"}
IGNORED = -100  # no label, as torch's cross_entropy and models of transformers have it


@dataclass(frozen=True)
class PackBatch:
    """A collate function: makes a batch of packs, each a row.

    Positions start over with each document, so that models of transformers keep documents apart. The
    first token of a document has no label: what comes before it is another document.

    Args:
        pad_id: the token that fills rows; it has no label.
        length: of all rows; None for the longest of the batch.
        document_ids: whether the batch has them, too: the number of its document for each token, -1
            for what fills a row. `document_mask` makes a mask of them.
    """

    pad_id: int = 0
    length: int | None = None
    document_ids: bool = False

    def __call__(self, packs: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Returns int64 tensors, shape (B, T): input_ids, labels, position_ids.

        Args:
            packs: documents, each a sequence of ids, or a mapping of `input_ids` and, if they aren't the
                same, `labels`.

        Raises:
            ValueError: a document has another key; a pack is longer than `length`.
        """
        rows = [self._row(pack) for pack in packs]
        longest = max(len(row["input_ids"]) for row in rows)
        length = longest if self.length is None else self.length
        if longest > length:
            raise ValueError(f"a pack has {longest} tokens, more than length={length}")
        return {
            name: torch.stack([_filled(row[name], length, fill) for row in rows])
            for name, fill in self._fills().items()
        }

    def _fills(self) -> dict[str, int | None]:
        fills: dict[str, int | None] = {"input_ids": self.pad_id, "labels": IGNORED}
        fills["position_ids"] = None  # they count on from 0
        return fills | ({"document_ids": -1} if self.document_ids else {})

    def _row(self, pack: Sequence[Any]) -> dict[str, Tensor]:
        ids, labels = zip(*map(_document, pack), strict=True)
        numbers = [torch.full_like(one, number) for number, one in enumerate(ids)]
        return {
            "input_ids": torch.cat(ids),
            "labels": torch.cat(labels),
            "position_ids": torch.cat([torch.arange(len(one)) for one in ids]),
            "document_ids": torch.cat(numbers),
        }


def document_mask(document_ids_BT: Tensor, *, is_causal: bool = True) -> Tensor:
    """Returns where a token may look: at itself and what precedes it in its document.

    Args:
        document_ids_BT: of a batch that `PackBatch(document_ids=True)` made.
        is_causal: False: at all of its document, as in a BERT, which positions alone don't tell apart.

    Returns:
        bool, shape (B, 1, T, T), as `scaled_dot_product_attention` takes it.
    """
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    return (same_BTT.tril() if is_causal else same_BTT)[:, None]


def num_tokens(document: Any) -> int:
    """Returns how many tokens a document has."""
    return len(document["input_ids"] if isinstance(document, Mapping) else document)


def _document(document: Any) -> tuple[Tensor, Tensor]:
    """Returns ids and labels, shape (L,); the first label is ignored."""
    given = document if isinstance(document, Mapping) else {"input_ids": document}
    if others := given.keys() - _KEYS:
        raise ValueError(f"a document has {sorted(others)}; packs take input_ids and labels")
    ids_L = torch.as_tensor(given["input_ids"], dtype=torch.int64)
    labels_L = torch.as_tensor(given.get("labels", ids_L), dtype=torch.int64).clone()
    if labels_L.shape != ids_L.shape:
        raise ValueError(f"a document has {len(ids_L)} input_ids and {len(labels_L)} labels")
    labels_L[0] = IGNORED
    return ids_L, labels_L


def _filled(row_T: Tensor, length: int, fill: int | None) -> Tensor:
    num = length - len(row_T)
    rest = torch.arange(num) if fill is None else torch.full((num,), fill)
    return torch.cat([row_T, rest])
