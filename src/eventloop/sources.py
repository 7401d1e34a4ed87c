"""Where training batches come from, each kind of data loader its own way, from any batch on."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from eventloop.data import is_map_style, known_length
from eventloop.first_batches import FirstBatches
from eventloop.order import Order
from eventloop.samples import SampleSeeds, seeded
from eventloop.seeding import KeptGenerators
from eventloop.stateful import Stateful
from eventloop.turns import Turns

Saved = Mapping[str, Any]


class Source(Protocol):
    """Gives the batches of an epoch, and those that were left of one when a run stopped."""

    kind: str

    @property
    def num_batches(self) -> int | None:
        """How many an epoch has; None where that can't be relied on."""

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Gives what `load` needs beside the number of batches taken."""

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        """Goes back to where `state_dict` was.

        Args:
            epoch: the one under way.
            num_taken: how many of its batches were taken; None between epochs.
        """

    def rest(self) -> Iterator[Any]:
        """Begins what is left of the epoch that was loaded."""

    def first(self) -> Any:
        """Gives the first batch of the epoch that was loaded, if that can be had."""


def source_of(dataloader: Any, sample_seed: int | None) -> Source:
    """Finds out how a data loader gives batches.

    Args:
        sample_seed: what the draws of a map-style data set are tied to; None leaves them alone.
    """
    if isinstance(dataloader, FirstBatches):
        return Limited(source_of(dataloader.dataloader, sample_seed), dataloader)
    if is_map_style(dataloader) and not isinstance(dataloader.dataset, Stateful):
        return MapStyle(dataloader, sample_seed)
    if isinstance(dataloader, Stateful):
        return StatefulSource(dataloader)
    if is_map_style(dataloader):
        return MapStyle(dataloader, sample_seed)
    if isinstance(dataloader, Sequence):
        return Listed(dataloader)
    return ReadAgain(dataloader)


class Listed:
    """A list of batches, or another sequence: taken by number.

    Args:
        batches: the sequence.
    """

    kind = "list"

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches
        self._num_taken = 0

    @property
    def num_batches(self) -> int:
        return len(self._batches)

    def start(self, epoch: int) -> Iterator[Any]:
        return iter(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._num_taken = num_taken or 0

    def rest(self) -> Iterator[Any]:
        return map(self._batches.__getitem__, range(self._num_taken, len(self._batches)))

    def first(self) -> Any:
        return self._batches[0]


class MapStyle:
    """A data loader over a map-style data set: what was taken isn't read again.

    It is iterated over as a copy with an order, and where it may draw a data set, of its own; the
    user's loader stays as it is.

    Args:
        dataloader: the user's.
        sample_seed: what the draws of the data set are tied to; None leaves them alone.
    """

    kind = "map"

    def __init__(self, dataloader: Any, sample_seed: int | None) -> None:
        makes_batches = dataloader.batch_sampler is not None
        self._sampler_name = "batch_sampler" if makes_batches else "sampler"
        self._generator = dataloader.generator
        self._seeds: SampleSeeds | None = None
        self.order = Order(getattr(dataloader, self._sampler_name), dataloader.generator)
        parts: dict[str, Any] = {self._sampler_name: self.order}
        if sample_seed is not None:
            self._seeds = SampleSeeds(sample_seed, shared=dataloader.num_workers > 0)
            dataset, collate_fn = seeded(dataloader.dataset, dataloader.collate_fn, self._seeds)
            parts |= {"dataset": dataset, "collate_fn": collate_fn}
        self._loader = _copy_with(dataloader, **parts)
        self._turns = Turns(self._loader, self.order)

    @property
    def num_batches(self) -> int:
        return len(self._loader)

    def start(self, epoch: int) -> Iterator[Any]:
        if self._seeds is not None:
            self._seeds.start_epoch(epoch)
        self.order.begin()
        return self._turns.begin()

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self.order.start,
            "now": self.order.standing(shared=False),
            "turns": self._turns.state_dict(),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turns.load_state_dict(saved["turns"])
        if num_taken is None:
            self.order.put(saved["now"])
            return
        if self._seeds is not None:
            self._seeds.start_epoch(epoch)
        self.order.seek(saved["start"], num_taken)

    def rest(self) -> Iterator[Any]:
        return self._turns.go_on()

    def first(self) -> Any:
        loader = _copy_with(
            self._loader,
            num_workers=0,
            prefetch_factor=None,
            timeout=0,
            persistent_workers=False,
            **{self._sampler_name: [self.order.first]},
        )
        return next(iter(loader))


class StatefulSource:
    """A data loader that knows where it is: `StatefulDataLoader` of torchdata, say.

    Args:
        dataloader: has `state_dict` and `load_state_dict`.
    """

    kind = "stateful"

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._is_exhausted = False
        self._is_loaded = False

    @property
    def num_batches(self) -> int | None:
        return known_length(self._dataloader)

    def start(self, epoch: int) -> Iterator[Any]:
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataloader": self._dataloader.state_dict(),
            "is_exhausted": self._is_exhausted,
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._dataloader.load_state_dict(saved["dataloader"])
        self._is_exhausted, self._is_loaded = saved["is_exhausted"], True

    def rest(self) -> Iterator[Any]:
        self._is_loaded = False
        kept = KeptGenerators()
        iterator = iter(self._dataloader)
        kept.put_back()
        return self._watched(iterator)

    def first(self) -> Any:
        return None

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._is_exhausted = False
        yield from iterator
        self._is_exhausted = True


class ReadAgain:
    """Any other iterable: what was taken is read once more, and dropped.

    Args:
        dataloader: the iterable.
    """

    kind = "iterable"

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader
        self._order = Order((), getattr(dataloader, "generator", None))
        self._turns = Turns(dataloader, self._order)
        self._num_taken = 0
        self._first: Any = None

    @property
    def num_batches(self) -> int | None:
        return known_length(self._dataloader)

    def start(self, epoch: int) -> Iterator[Any]:
        self._order.start = self._order.standing(shared=True)
        return self._turns.begin()

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": self._order.start,
            "now": self._order.standing(shared=False),
            "turns": self._turns.state_dict(),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turns.load_state_dict(saved["turns"])
        if num_taken is None:
            self._order.put(saved["now"])
        else:
            self._order.start, self._num_taken = saved["start"], num_taken

    def rest(self) -> Iterator[Any]:
        kept = KeptGenerators()
        self._order.put(self._order.start or {})
        iterator = self._turns.go_on()
        for idx, batch in enumerate(itertools.islice(iterator, self._num_taken)):
            self._first = batch if idx == 0 else self._first
        kept.put_back()
        warnings.warn(
            f"{self._num_taken} batches were read once more to go on in mid-epoch: a "
            f"{type(self._dataloader).__name__} can't begin at a later one",
            stacklevel=2,
        )
        return iterator

    def first(self) -> Any:
        return self._first


class Limited:
    """The first batches of another source.

    Args:
        source: of the data loader inside.
        dataloader: the limit.
    """

    def __init__(self, source: Source, dataloader: FirstBatches) -> None:
        self.kind = source.kind
        self._source = source
        self._dataloader = dataloader
        self._num_left = 0

    @property
    def num_batches(self) -> int | None:
        return self._dataloader.num_batches

    def start(self, epoch: int) -> Iterator[Any]:
        return itertools.islice(self._source.start(epoch), self._dataloader.limit)

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._num_left = max(0, self._dataloader.limit - (num_taken or 0))
        self._source.load(saved, epoch, num_taken)

    def rest(self) -> Iterator[Any]:
        return itertools.islice(self._source.rest(), self._num_left)

    def first(self) -> Any:
        return self._source.first()


def _copy_with(dataloader: Any, **parts: Any) -> Any:
    """Gives a data loader with other parts, of the same class and with all its attributes.

    torch forbids to set the parts once a loader is built, because its batch sampler would keep the
    old ones; the whole order is set here. `_iterator` (checked with torch 2.13) holds workers that
    stay, which would go on with the old parts.
    """
    copied = copy.copy(dataloader)
    for name, value in {**parts, "_iterator": None}.items():
        object.__setattr__(copied, name, value)
    return copied
