"""Batches of a stream, in the process that trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import default_collate

from eventloop_streaming.stream import Position, require_positive


class Batches:
    """A train data loader: batches of the samples of a stream, with the stream's position.

    For worker processes, use torchdata's `StatefulDataLoader` instead.

    Args:
        samples: a stream, as in `Shuffled`.
        batch_size: number of samples in a batch; the last may have fewer.
        collate_fn: makes a batch of a list of samples.
        drop_last: whether to drop a last batch with fewer samples.
    """

    def __init__(
        self,
        samples: Iterable[Any],
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
    ) -> None:
        require_positive(batch_size=batch_size)
        self._source = Position(samples)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._collate = collate_fn
        self._is_loaded = False

    @property
    def suits_any_ranks(self) -> bool:
        """Whether a run can be resumed in mid-epoch with another number of ranks."""
        return self._source.suits_any_ranks

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch, or after `load_state_dict` its remaining batches."""
        if not self._is_loaded:
            self._source.begin()
        self._is_loaded = False
        iterator = self._source.samples()
        while samples := list(itertools.islice(iterator, self.batch_size)):
            if len(samples) == self.batch_size or not self.drop_last:
                yield self._collate(samples)
        self._source.begin()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the stream."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self._source.begin()
        self._source.load_state_dict(state)
        self._is_loaded = True
