"""Where training batches come from, each kind of data loader its own way, from any batch on."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from eventloop.data.combine import (
    Cycled,
    FirstBatches,
    Zipped,
    is_map_style,
    known_length,
    seed_of_part,
)
from eventloop.data.combined_sources import Repeated, SideBySide
from eventloop.data.map_style import MapStyle, Turns
from eventloop.data.places import Places
from eventloop.data.sample_order import Order, Stateful
from eventloop.errors import TaskError
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
    return ReadAgain(dataloader)


class Listed:
    """A list of batches, or another sequence: taken by number.

    Args:
        batches: the sequence.
    """

    kind = "list"
    suits_any_ranks = has_first = True
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


class ReadAgain:
    """Any other iterable: what was taken is read once more, and dropped.

    What it counts itself isn't kept: it has no method that would say so, or take it back.

    Args:
        dataloader: the iterable.
    """

    kind = "iterable"
    suits_any_ranks, has_first = False, True

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._places = Places(dataloader)
        self._order = Order((), getattr(dataloader, "generator", None))
        self._turns = Turns(dataloader, self._order)
        self._num_workers = getattr(dataloader, "num_workers", 0)
        self._counting = getattr(dataloader, "dataset", dataloader)
        self._built = _counts_of(self._counting)
        self._lost: Mapping[str, Any] = {}
        self._num_taken = 0
        self._first: Any = None

    @property
    def num_batches(self) -> int | None:
        return known_length(self._dataloader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._order.start = self._standing(shared=True)
        return self._turns.begin()

    def look_ahead(self, num_taken: int) -> None:
        pass

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {
            "num_workers": self._num_workers,
            "start": None if num_taken is None else self._order.start,
            "now": self._standing(shared=False),
            "turns": self._turns.state_dict(),
            "counted": dict(_counts_of(self._counting).items() - self._built.items()),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turns.load_state_dict(saved["turns"])
        self._lost = saved.get("counted", {})
        if num_taken is None:
            self._put(saved["now"])
            if self._lost:
                warnings.warn(f"{self._name} doesn't go on: {self._anew()}", stacklevel=2)
            return
        if saved["num_workers"] != self._num_workers:
            raise TaskError(
                f"the run was stopped in mid-epoch with num_workers={saved['num_workers']}, and an "
                f"iterable data set gives other batches with {self._num_workers}",
                fix=f"set num_workers={saved['num_workers']} for the train data loader, or go on "
                "from a checkpoint at the end of an epoch",
            )
        self._order.start, self._num_taken = saved["start"], num_taken
        self._put(saved["start"] or {})  # when it is wanted it would be too late to refuse it

    def rest(self) -> Iterator[Any]:
        kept = KeptGenerators()
        self._put(self._order.start or {})
        iterator = self._turns.go_on()
        num_read = 0
        for batch in itertools.islice(iterator, self._num_taken):
            self._first = self._first if num_read else batch
            num_read += 1
        kept.put_back()
        if not num_read and not self._lost:
            return iterator
        warnings.warn(
            f"{num_read} batches were read once more to go on in mid-epoch: {self._name} can't "
            f"begin at a later one, and {self._anew()}",
            stacklevel=2,
        )
        return iterator

    def first(self) -> Any:
        return self._first

    @property
    def doubts(self) -> tuple[str, ...]:
        held = ", ".join(f"`{path.lstrip('.')}`" for path in self._places.iterators)
        why = f" that holds {held}, whose place isn't kept" if held else ""
        return (f"{self._name}{why}",)

    def _standing(self, *, shared: bool) -> dict[str, Any]:
        return {**self._order.standing(shared=shared), "places": self._places.standing()}

    def _put(self, standing: Saved) -> None:
        self._order.put(standing)
        self._places.put(standing.get("places", {}))

    @property
    def _name(self) -> str:
        return f"a {type(self._counting).__name__}"

    def _anew(self) -> str:
        """Says what isn't kept; by name where it was seen to change."""
        counted = ", ".join(f"{name}={value!r}" for name, value in sorted(self._lost.items()))
        what = counted or "its epochs, for instance"
        return (
            f"what it counts itself ({what}) starts anew; it is kept where the data has state_dict "
            "and load_state_dict"
        )


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


def _counts_of(data: Any) -> dict[str, Any]:
    """Returns the attributes that may be counts: plain numbers and texts."""
    attributes = getattr(data, "__dict__", {}).items()
    return {name: one for name, one in attributes if type(one) in (bool, int, float, str)}
