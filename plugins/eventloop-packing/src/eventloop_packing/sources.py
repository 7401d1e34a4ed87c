"""Where packs come from: a data set with a length, or a stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset

from eventloop_packing.batches import PackBatch, num_tokens
from eventloop_packing.fit import OpenPacks, best_fit, require_fits


@runtime_checkable
class Stateful(Protocol):
    """Documents whose position can be saved and restored."""

    def state_dict(self) -> Any:
        """Returns the position."""

    def load_state_dict(self, state: Any) -> None:
        """Restores what `state_dict` returned."""


class PackedDataset(Dataset[list[Any]]):
    """A data set of packs over one of documents; each sample is a list of documents.

    Packs are made once. Any sampler shuffles them: `DataLoader(PackedDataset(...), batch_size=8,
    shuffle=True, collate_fn=PackBatch())`.

    Args:
        dataset: map-style; a sample is a sequence of ids, or a mapping with `input_ids`.
        max_tokens: of a pack at most.
        lengths: tokens of each document; without them every document is read once, now.

    Attributes:
        packs: the indices of the documents in each pack.
        used_frac: how much of all rows of `max_tokens` is documents, in (0, 1].

    Raises:
        ValueError: a document is empty, or longer than a pack; there are more or fewer lengths.
    """

    def __init__(
        self, dataset: Any, max_tokens: int, *, lengths: Iterable[int] | None = None
    ) -> None:
        if lengths is None:
            lengths = [num_tokens(dataset[idx]) for idx in range(len(dataset))]
        known = [int(one) for one in lengths]
        if len(known) != len(dataset) or not known:
            raise ValueError(f"{len(known)} lengths for {len(dataset)} documents")
        self._dataset = dataset
        self.packs = best_fit(known, max_tokens)
        self.used_frac = sum(known) / (len(self.packs) * max_tokens)

    def __len__(self) -> int:
        """Returns the number of packs."""
        return len(self.packs)

    def __getitem__(self, idx: int) -> list[Any]:
        """Returns the documents of a pack."""
        return [self._dataset[one] for one in self.packs[idx]]


class PackedStream:
    """Batches of packs, out of documents that come one after the other: a train data loader.

    It has `state_dict` and `load_state_dict`: open packs and position are part of the run's
    checkpoints, and a run that is resumed gets the same batches. Each epoch begins the documents anew;
    at its end the open packs are the last batches.

    Args:
        documents: may be iterated over again. If it has `state_dict` and `load_state_dict`, it goes on
            by itself; else those that were taken are read again and dropped.
        max_tokens: of a pack at most.
        batch_size: packs in a batch; the last may have fewer.
        num_open: how many packs are filled at a time: more waste less, and hold more documents.
        collate_fn: makes a batch of a list of packs; `PackBatch(length=max_tokens)` unless given.

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
        given = {"max_tokens": max_tokens, "batch_size": batch_size, "num_open": num_open}
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not an int of 1 or more")
        self.max_tokens, self.batch_size = max_tokens, batch_size
        self._documents = documents
        self._collate = PackBatch(length=max_tokens) if collate_fn is None else collate_fn
        self._open = OpenPacks(max_tokens, num_open)
        self._closed: list[list[Any]] = []
        self._num_read = 0
        self._is_loaded = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch; after `load_state_dict` those that are left."""
        if not self._is_loaded:
            self._open.close()
            self._closed, self._num_read = [], 0
        skip = 0 if isinstance(self._documents, Stateful) else self._num_read
        self._is_loaded = False
        for document in itertools.islice(self._documents, skip, None):
            length = num_tokens(document)
            require_fits(length, self.max_tokens, f"document {self._num_read} of the stream")
            self._num_read += 1
            self._closed += self._open.add(document, length)
            while len(self._closed) >= self.batch_size:
                yield self._batch()
        self._closed += self._open.close()
        while self._closed:
            yield self._batch()

    def state_dict(self) -> dict[str, Any]:
        """Returns the packs that no batch has had yet, and the position in the documents."""
        documents = self._documents
        return {
            "open": self._open.state_dict(),
            "closed": [list(pack) for pack in self._closed],
            "num_read": self._num_read,
            "documents": documents.state_dict() if isinstance(documents, Stateful) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        self._open.load_state_dict(state["open"])
        self._closed = [list(pack) for pack in state["closed"]]
        self._num_read = state["num_read"]
        if isinstance(self._documents, Stateful):
            self._documents.load_state_dict(state["documents"])
        self._is_loaded = True

    def _batch(self) -> Any:
        packs, self._closed = self._closed[: self.batch_size], self._closed[self.batch_size :]
        return self._collate(packs)
