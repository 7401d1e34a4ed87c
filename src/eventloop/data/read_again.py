"""Iterables that can't begin at a later batch: what was taken is read once more."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from eventloop.data.combine import known_length
from eventloop.data.map_style import Turns
from eventloop.data.places import Places
from eventloop.data.sample_order import Order
from eventloop.errors import TaskError
from eventloop.rng import KeptGenerators

Saved = Mapping[str, Any]


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


def _counts_of(data: Any) -> dict[str, Any]:
    """Returns the attributes that may be counts: plain numbers and texts."""
    attributes = getattr(data, "__dict__", {}).items()
    return {name: one for name, one in attributes if type(one) in (bool, int, float, str)}
