"""Rows of whole documents, so that a language model computes no padding: best fit, data sets, streams, batches."""

# B = row of a batch, T = token of a row, L = token of a document

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset

# No label, as in torch's cross_entropy and models of transformers.
IGNORED = -100
# Tokenizers also return an attention mask, all ones for an unpadded document; it is dropped.
_KEYS = {"input_ids", "labels", "attention_mask"}


def best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Packs documents best fit first, longest document first: each goes into the fullest pack with room for it.

    Args:
        lengths: tokens of each document.
        max_tokens: maximum number of tokens in a pack.

    Returns:
        The document indices of each pack, in ascending order; packs are sorted by their first index.

    Raises:
        ValueError: a length isn't between 1 and `max_tokens`.

    Source: Johnson 1973, "Near-optimal bin packing algorithms"; for language models Ding et al. 2024,
    arXiv:2404.10830.
    """
    for idx, length in enumerate(lengths):
        require_fits(length, max_tokens, f"document {idx}")
    packs: list[list[int]] = []
    packs_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys, sorted
    for idx in sorted(range(len(lengths)), key=lambda idx: -lengths[idx]):
        position = bisect.bisect_left(rooms, lengths[idx])
        if position == len(rooms):
            room = max_tokens
            pack = len(packs)
            packs.append([])
        else:
            room = rooms[position]
            pack = packs_by_room[room].pop()
            if not packs_by_room[room]:
                del packs_by_room[room], rooms[position]
        packs[pack].append(idx)
        room -= lengths[idx]
        if room:
            if room not in packs_by_room:
                bisect.insort(rooms, room)
            packs_by_room.setdefault(room, []).append(pack)
    return sorted(sorted(pack) for pack in packs)


def require_fits(length: int, max_tokens: int, subject: str) -> None:
    """Raises a ValueError if a document is empty, or longer than a pack."""
    if not 0 < length <= max_tokens:
        raise ValueError(
            f"{subject} has {length} tokens, and a pack takes 1 to max_tokens={max_tokens}: leave it "
            "out, or cut it into pieces"
        )


def document_length(document: Any) -> int:
    """Returns how many tokens a document has."""
    return len(document["input_ids"] if isinstance(document, Mapping) else document)


class PackedDataset(Dataset[list[Any]]):
    """A map-style dataset of packs over a dataset of documents; each sample is a list of documents.

    Packs are made once. Any sampler shuffles them: `DataLoader(PackedDataset(...), batch_size=8,
    shuffle=True, collate_fn=PackBatch())`.

    Args:
        dataset: map-style; a sample is a sequence of ids, or a mapping with `input_ids`.
        max_tokens: maximum number of tokens in a pack.
        lengths: tokens of each document; None reads every document once, in the constructor.

    Attributes:
        packs: the indices of the documents in each pack.
        used_frac: share of the packs' capacity that holds tokens, in (0, 1].

    Raises:
        ValueError: a document is empty, or longer than a pack; there are more or fewer lengths.
    """

    def __init__(
        self, dataset: Any, max_tokens: int, *, lengths: Iterable[int] | None = None
    ) -> None:
        if lengths is None:
            lengths = [document_length(dataset[idx]) for idx in range(len(dataset))]
        lengths = [int(length) for length in lengths]
        if len(lengths) != len(dataset) or not lengths:
            raise ValueError(f"{len(lengths)} lengths for {len(dataset)} documents")
        self._dataset = dataset
        self.packs = best_fit(lengths, max_tokens)
        self.used_frac = sum(lengths) / (len(self.packs) * max_tokens)

    def __len__(self) -> int:
        """Returns the number of packs."""
        return len(self.packs)

    def __getitem__(self, idx: int) -> list[Any]:
        """Returns the documents of a pack."""
        return [self._dataset[document] for document in self.packs[idx]]


@runtime_checkable
class Stateful(Protocol):
    """Documents whose position can be saved and restored."""

    def state_dict(self) -> Any:
        """Returns the position."""

    def load_state_dict(self, state: Any) -> None:
        """Restores the position from a `state_dict`."""


class PackedStream:
    """Batches of packs from a stream of documents: a train data loader.

    Open packs and the position in the documents are part of the run's checkpoints, through `state_dict`
    and `load_state_dict`, so that a resumed run gets the same batches. Each epoch starts the documents
    again; the packs still open at its end become the last batches.

    Args:
        documents: can be iterated over repeatedly. With `state_dict` and `load_state_dict` it restores
            its own position; otherwise a resumed run reads and drops the documents already used.
        max_tokens: maximum number of tokens in a pack.
        batch_size: number of packs in a batch; the last batch may have fewer.
        num_open: number of packs being filled; more packs waste less, but hold more documents in memory.
        collate_fn: makes a batch of a list of packs; the default is `PackBatch(length=max_tokens)`.

    Raises:
        ValueError: a number is less than 1. While it is iterated over: a document is empty, or longer
            than a pack.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        max_tokens: int,
        *,
        batch_size: int = 1,
        num_open: int = 64,
        collate_fn: Callable[[list[list[Any]]], Any] | None = None,
    ) -> None:
        sizes = {"max_tokens": max_tokens, "batch_size": batch_size, "num_open": num_open}
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not an int of 1 or more")
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self._documents = documents
        self._collate = PackBatch(length=max_tokens) if collate_fn is None else collate_fn
        self._open = OpenPacks(max_tokens, num_open)
        self._closed: list[list[Any]] = []
        self._num_read = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch; after `load_state_dict` the remaining ones."""
        if not self._is_loaded:
            self._open.close()
            self._closed = []
            self._num_read = 0
        num_skipped = 0 if isinstance(self._documents, Stateful) else self._num_read
        self._is_loaded = False
        for document in itertools.islice(self._documents, num_skipped, None):
            length = document_length(document)
            require_fits(length, self.max_tokens, f"document {self._num_read} of the stream")
            self._num_read += 1
            self._closed += self._open.add(document, length)
            while len(self._closed) >= self.batch_size:
                yield self._batch()
        self._closed += self._open.close()
        while self._closed:
            yield self._batch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the packs that aren't in a batch yet, and the position in the documents."""
        documents = self._documents
        return {
            "open": self._open.state_dict(),
            "closed": [list(pack) for pack in self._closed],
            "num_read": self._num_read,
            "documents": documents.state_dict() if isinstance(documents, Stateful) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the packs and the position from a `state_dict`."""
        self._open.load_state_dict(state["open"])
        self._closed = [list(pack) for pack in state["closed"]]
        self._num_read = state["num_read"]
        if isinstance(self._documents, Stateful):
            self._documents.load_state_dict(state["documents"])
        self._is_loaded = True

    def _batch(self) -> Any:
        packs = self._closed[: self.batch_size]
        self._closed = self._closed[self.batch_size :]
        return self._collate(packs)


class OpenPacks:
    """Packs that are being filled from a stream, whose documents aren't known in advance.

    A document goes into the open pack with the least room that fits it. If none fits it, a new pack is
    opened; if too many are open, the fullest is closed first.

    Args:
        max_tokens: maximum number of tokens in a pack.
        num_open: maximum number of open packs.
    """

    def __init__(self, max_tokens: int, num_open: int) -> None:
        self._max_tokens = max_tokens
        self._num_open = num_open
        self._packs: list[tuple[int, list[Any]]] = []  # room left and documents of each

    def add(self, document: Any, length: int) -> list[list[Any]]:
        """Puts a document into a pack; returns the packs that this closes, 2 at most."""
        closed = []
        fits = [idx for idx, (room, _) in enumerate(self._packs) if room >= length]
        if fits:
            room, pack = self._packs.pop(min(fits, key=self._room))
        else:
            if len(self._packs) == self._num_open:
                fullest = min(range(self._num_open), key=self._room)
                closed.append(self._packs.pop(fullest)[1])
            room = self._max_tokens
            pack = []
        pack.append(document)
        if room == length:
            closed.append(pack)
        else:
            self._packs.append((room - length, pack))
        return closed

    def close(self) -> list[list[Any]]:
        """Closes all packs and returns them, the most recently filled last."""
        packs = [pack for _, pack in self._packs]
        self._packs = []
        return packs

    def state_dict(self) -> list[Any]:
        """Returns the room and the documents of each open pack."""
        return [[room, list(pack)] for room, pack in self._packs]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restores the open packs from a `state_dict`."""
        self._packs = [(room, list(pack)) for room, pack in state]

    def _room(self, idx: int) -> int:
        return self._packs[idx][0]


@dataclass(frozen=True)
class PackBatch:
    """A collate function: makes a batch of packs, each a row.

    Positions start over with each document, so that models of transformers keep documents apart. The
    first token of a document has no label: the token before it belongs to another document.

    Args:
        pad_id: the token that fills rows; it has no label.
        length: length of all rows; None for the longest in the batch.
        document_ids: whether to add the index of each token's document within its row, -1 for padding;
            `document_mask` makes an attention mask of it.
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
        rows = [_row(pack) for pack in packs]
        longest = max(len(row["input_ids"]) for row in rows)
        length = longest if self.length is None else self.length
        if longest > length:
            raise ValueError(f"a pack has {longest} tokens, more than length={length}")
        return {
            name: torch.stack([_filled(row[name], length, fill) for row in rows])
            for name, fill in self._fills().items()
        }

    def _fills(self) -> dict[str, int | None]:
        """Returns the padding value of each tensor; None for positions, which count from 0 in the padding."""
        fills = {"input_ids": self.pad_id, "labels": IGNORED, "position_ids": None}
        return fills | ({"document_ids": -1} if self.document_ids else {})


def document_mask(document_ids_BT: Tensor, *, is_causal: bool = True) -> Tensor:
    """Returns which tokens each token may attend to: itself and the preceding tokens of its document.

    Args:
        document_ids_BT: from a batch of `PackBatch(document_ids=True)`.
        is_causal: False: all tokens of its document, as in a BERT.

    Returns:
        bool, shape (B, 1, T, T), as `scaled_dot_product_attention` takes it.
    """
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    return (same_BTT.tril() if is_causal else same_BTT)[:, None]


def _row(pack: Sequence[Any]) -> dict[str, Tensor]:
    ids, labels = zip(*map(_ids_and_labels, pack), strict=True)
    numbers = [torch.full_like(ids_L, number) for number, ids_L in enumerate(ids)]
    return {
        "input_ids": torch.cat(ids),
        "labels": torch.cat(labels),
        "position_ids": torch.cat([torch.arange(len(ids_L)) for ids_L in ids]),
        "document_ids": torch.cat(numbers),
    }


def _ids_and_labels(document: Any) -> tuple[Tensor, Tensor]:
    """Returns ids and labels, shape (L,); the first label is ignored."""
    entries = document if isinstance(document, Mapping) else {"input_ids": document}
    if unknown := entries.keys() - _KEYS:
        raise ValueError(f"a document has {sorted(unknown)}; packs take input_ids and labels")
    ids_L = torch.as_tensor(entries["input_ids"], dtype=torch.int64)
    labels_L = torch.as_tensor(entries.get("labels", ids_L), dtype=torch.int64).clone()
    if labels_L.shape != ids_L.shape:
        raise ValueError(f"a document has {len(ids_L)} input_ids and {len(labels_L)} labels")
    labels_L[0] = IGNORED
    return ids_L, labels_L


def _filled(row_T: Tensor, length: int, fill: int | None) -> Tensor:
    num = length - len(row_T)
    padding = torch.arange(num) if fill is None else torch.full((num,), fill)
    return torch.cat([row_T, padding])
