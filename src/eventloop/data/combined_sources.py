"""Sources of several data loaders: each part goes on from its own place, as it would alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eventloop.data.combine import (
    Cycled,
    Zipped,
    is_endless,
    nothing_to_repeat,
    shortest,
    tell_epoch,
)
from eventloop.rng import kept_generators

if TYPE_CHECKING:
    from eventloop.data.loaders import Source

Saved = Mapping[str, Any]


class SideBySide:
    """Several sources, of which each batch has one batch.

    Args:
        dataloader: what is iterated over.
        sources: of its parts, by name.
    """

    even_sizes = None

    def __init__(self, dataloader: Zipped, sources: Mapping[str, Source]) -> None:
        self._dataloader = dataloader
        self._sources = sources
        self.kind = " and ".join(one.kind for one in sources.values())
        self.suits_any_ranks = all(one.suits_any_ranks for one in sources.values())
        self.has_first = all(one.has_first for one in sources.values())
        self.doubts = tuple(doubt for one in sources.values() for doubt in one.doubts)

    @property
    def num_batches(self) -> int | None:
        parts = self._dataloader.parts
        named = self._sources.items()
        return shortest(one.num_batches for name, one in named if not is_endless(parts[name]))

    def start(self, epoch: int) -> Iterator[Any]:
        iterators = {name: one.start(epoch) for name, one in self._sources.items()}
        return self._dataloader.side_by_side(iterators)

    def look_ahead(self, num_taken: int) -> None:
        for one in self._sources.values():
            one.look_ahead(num_taken)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {"parts": {name: one.state_dict(num_taken) for name, one in self._sources.items()}}

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        for name, one in self._sources.items():
            one.load(saved["parts"][name], epoch, num_taken)

    def rest(self) -> Iterator[Any]:
        return self._dataloader.side_by_side(
            {name: one.rest() for name, one in self._sources.items()}
        )

    def first(self) -> Any:
        batches = {name: iter([one.first()]) for name, one in self._sources.items()}
        return next(self._dataloader.side_by_side(batches))


class Repeated:
    """A source that begins anew when it has ended; its turns are its epochs, not those of the run.

    Args:
        dataloader: what is iterated over.
        source: of the data loader inside.
    """

    has_first = False
    even_sizes = None

    def __init__(self, dataloader: Cycled, source: Source) -> None:
        self._dataloader = dataloader.dataloader
        self._source = source
        self.kind = f"cycled {source.kind}"
        self.suits_any_ranks = source.suits_any_ranks
        self.doubts = source.doubts
        self._turn = -1
        self._num_in_turn = 0  # of its batches, how many it has yielded
        self._num_in_epoch = 0
        self._iterator: Iterator[Any] | None = None
        self._is_loaded = False

    @property
    def num_batches(self) -> None:
        return None

    def start(self, epoch: int) -> Iterator[Any]:
        self._num_in_epoch = 0
        return self._batches()

    def look_ahead(self, num_taken: int) -> None:
        self._source.look_ahead(self._num_in_turn)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        # One that is held ahead, the first of a turn perhaps, is given again.
        num_ahead = 0 if num_taken is None else max(0, self._num_in_epoch - num_taken)
        num_in_turn = self._num_in_turn - num_ahead if self._turn >= 0 else None
        return {
            "turn": self._turn,
            "num_in_turn": num_in_turn,
            "turned": self._source.state_dict(num_in_turn),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turn, num_in_turn = saved["turn"], saved["num_in_turn"]
        self._num_in_turn, self._num_in_epoch = num_in_turn or 0, num_taken or 0
        self._iterator, self._is_loaded = None, num_in_turn is not None
        tell_epoch(self._dataloader, max(0, self._turn))
        self._source.load(saved["turned"], max(0, self._turn), num_in_turn)

    def rest(self) -> Iterator[Any]:
        return self._batches()

    def first(self) -> Any:
        return None

    def _batches(self) -> Iterator[Any]:
        while True:
            if self._iterator is None:
                self._iterator = self._rest_of_turn() if self._is_loaded else self._next_turn()
            for batch in self._iterator:
                self._num_in_turn += 1
                self._num_in_epoch += 1
                yield batch
            if not self._num_in_turn:
                raise nothing_to_repeat(self._dataloader)
            self._iterator = None

    def _rest_of_turn(self) -> Iterator[Any]:
        self._is_loaded = False
        rest = self._source.rest()
        if self._num_in_turn:
            return rest
        # Some are at the end of the turn before: it has drawn, and been told, what begins this one.
        with kept_generators():
            ahead = list(itertools.islice(rest, 1))
            if not ahead:
                rest = self._source.start(self._turn)
                ahead = list(itertools.islice(rest, 1))
        return itertools.chain(ahead, rest)

    def _next_turn(self) -> Iterator[Any]:
        self._turn += 1
        self._num_in_turn = 0
        tell_epoch(self._dataloader, self._turn)
        return self._source.start(self._turn)
