"""Where training batches come from, each kind of data loader its own way, from any batch on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from eventloop.data.combine import (
    Cycled,
    FirstBatches,
    NoData,
    Zipped,
    is_map_style,
    known_length,
    seed_of_part,
)
from eventloop.data.combined_sources import Repeated, SideBySide
from eventloop.data.iterables import ReadAgain
from eventloop.data.map_style import MapStyle
from eventloop.data.sample_order import Stateful
from eventloop.rng import KeptGenerators

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes

Saved = Mapping[str, Any]


class Source(Protocol):
    """Where the batches of an epoch come from, and those left of one when a run stopped.

    Attributes:
        kind: of the data loader; a run goes on with the same one.
        suits_any_ranks: whether its position is the same for all ranks, however many there are.
        has_first: whether `first` can return the first batch of an epoch that was loaded.
    """

    kind: str
    suits_any_ranks: bool
    has_first: bool

    @property
    def doubts(self) -> tuple[str, ...]:
        """What may give a resumed run other batches, each a data loader and why that isn't known."""

    @property
    def num_batches(self) -> int | None:
        """How many an epoch has; None where that can't be relied on."""

    @property
    def even_sizes(self) -> Any:
        """What says how many samples each batch has; None where ranks with the same may differ."""

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch."""

    def look_ahead(self, num_taken: int) -> None:
        """Called before a batch is taken that may be held for a while, after so many."""

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        """Returns what `load` needs beside the number of batches taken.

        Args:
            num_taken: that number; None between epochs, when nothing of the last one matters.
        """

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        """Goes back to where `state_dict` was.

        Args:
            epoch: the one under way.
            num_taken: how many of its batches were taken; None between epochs.
        """

    def rest(self) -> Iterator[Any]:
        """Begins what is left of the epoch that was loaded."""

    def first(self) -> Any:
        """Returns the first batch of the epoch that was loaded, if that can be had."""


def source_of(dataloader: Any, processes: Processes, sample_seed: int | None) -> Source:
    """Finds out how a data loader gives batches.

    Args:
        processes: the ranks, each with a loader of its own.
        sample_seed: what the draws of a map-style data set are tied to; None leaves them alone.
    """
    if isinstance(dataloader, FirstBatches):
        return Limited(source_of(dataloader.dataloader, processes, sample_seed), dataloader)
    if isinstance(dataloader, Cycled):
        return Repeated(dataloader, source_of(dataloader.dataloader, processes, sample_seed))
    if isinstance(dataloader, Zipped):
        sources = {}
        for idx, (name, one) in enumerate(dataloader.parts.items()):
            seed = None if sample_seed is None else seed_of_part(sample_seed, idx)
            sources[name] = source_of(one, processes, seed)
        return SideBySide(dataloader, sources)
    is_loader = isinstance(dataloader, DataLoader)
    # torchdata's loader knows where it is if its data set does; it reads again, and may miscount
    # when it does so twice (0.11), what a data set without state gives.
    knows_itself = isinstance(dataloader, Stateful)
    if knows_itself and (not is_loader or isinstance(dataloader.dataset, Stateful)):
        return StatefulSource(dataloader)
    if is_map_style(dataloader):
        return MapStyle(dataloader, processes, sample_seed)
    if isinstance(dataloader, Sequence):
        return Listed(dataloader)
    if isinstance(dataloader, NoData):
        return Nothing(dataloader)
    return ReadAgain(dataloader)


class Listed:
    """A list of batches, or another sequence: taken by number.

    Args:
        batches: the sequence.
    """

    kind = "list"
    suits_any_ranks = has_first = True
    even_sizes = None
    doubts: tuple[str, ...] = ()

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._num_taken = 0

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def start(self, epoch: int) -> Iterator[Any]:
        return iter(self._batches)

    def look_ahead(self, num_taken: int) -> None:
        pass

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {}

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._num_taken = num_taken or 0

    def rest(self) -> Iterator[Any]:
        return map(self._batches.__getitem__, range(self._num_taken, len(self._batches)))

    def first(self) -> Any:
        return self._batches[0]


class StatefulSource:
    """A data loader that knows where it is: `StatefulDataLoader` of torchdata, say.

    Args:
        dataloader: has `state_dict` and `load_state_dict`.
    """

    kind = "stateful"
    suits_any_ranks = has_first = False
    even_sizes = None
    doubts: tuple[str, ...] = ()

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._has_begun = self._is_exhausted = self._is_loaded = False
        self._saved: Saved = {}
        self._num_given = 0
        self._before_ahead: dict[str, Any] | None = None

    @property
    def num_batches(self) -> int | None:
        return known_length(self._dataloader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._has_begun, self._num_given = True, 0
        if not self._is_loaded:
            return self._watched(iter(self._dataloader))
        self._is_loaded = False
        iterator = iter(self._dataloader)
        if self._is_exhausted:
            # Some begin the next epoch by now, others end the one that is over.
            ahead = list(itertools.islice(iterator, 1))
            if ahead:
                return self._watched(itertools.chain(ahead, iterator))
        return self._watched(iter(self._dataloader))

    def look_ahead(self, num_taken: int) -> None:
        self._before_ahead = self.state_dict(num_taken)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        # torchdata's would start workers, and draw, to say that nothing was done (since).
        if self._is_loaded:
            return dict(self._saved)
        # The loader counts what is held ahead as taken.
        is_ahead = num_taken is not None and self._num_given > num_taken
        if is_ahead and self._before_ahead is not None:
            return self._before_ahead
        return {
            "dataloader": self._dataloader.state_dict() if self._has_begun else None,
            "is_exhausted": self._is_exhausted,
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        if saved["dataloader"] is not None:
            self._dataloader.load_state_dict(saved["dataloader"])
            self._has_begun, self._is_loaded, self._saved = True, True, saved
        self._is_exhausted, self._num_given = saved["is_exhausted"], num_taken or 0

    def rest(self) -> Iterator[Any]:
        if self._is_exhausted:  # while other ranks weren't
            return iter(())
        self._is_loaded = False
        kept = KeptGenerators()
        iterator = iter(self._dataloader)
        kept.put_back()
        return self._watched(iterator)

    def first(self) -> Any:
        return None

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._is_exhausted = False
        for batch in iterator:
            self._num_given += 1
            yield batch
        self._is_exhausted = True


class Nothing:
    """No data at all: a run whose batches a plugin makes, or that needs none.

    Args:
        dataloader: gives empty batches.
    """

    kind = "none"
    suits_any_ranks = has_first = True
    doubts: tuple[str, ...] = ()
    num_batches = even_sizes = None

    def __init__(self, dataloader: NoData) -> None:
        self._dataloader = dataloader

    def start(self, epoch: int) -> Iterator[Any]:
        return iter(self._dataloader)

    def look_ahead(self, num_taken: int) -> None:
        pass

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {}

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        pass

    def rest(self) -> Iterator[Any]:
        return iter(self._dataloader)

    def first(self) -> Any:
        return {}


class Limited:
    """The first batches of another source.

    Args:
        source: of the data loader inside.
        dataloader: the limit.
    """

    def __init__(self, source: Source, dataloader: FirstBatches) -> None:
        self.kind, self.doubts = source.kind, source.doubts
        self.suits_any_ranks, self.has_first = source.suits_any_ranks, source.has_first
        self._source = source
        self._dataloader = dataloader
        self._num_left = 0

    @property
    def num_batches(self) -> int | None:
        return self._dataloader.num_batches

    @property
    def even_sizes(self) -> Any:
        return self._source.even_sizes

    def start(self, epoch: int) -> Iterator[Any]:
        return itertools.islice(self._source.start(epoch), self._dataloader.limit)

    def look_ahead(self, num_taken: int) -> None:
        self._source.look_ahead(num_taken)

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return self._source.state_dict(num_taken)

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._num_left = max(0, self._dataloader.limit - (num_taken or 0))
        self._source.load(saved, epoch, num_taken)

    def rest(self) -> Iterator[Any]:
        return itertools.islice(self._source.rest(), self._num_left)

    def first(self) -> Any:
        return self._source.first()
