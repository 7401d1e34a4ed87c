"""How an epoch's turn through a data loader begins, with the draws of a run without a break."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from eventloop.seeding import KeptGenerators

if TYPE_CHECKING:
    from eventloop.data.sample_order import Order


class Turns:
    """Begins turns through a data loader.

    Each turn of torch's data loader draws a number, the seed of its workers' generators, before it
    draws an order; where workers stay (`persistent_workers`), only the first one does. A run that
    was stopped starts workers once more, or has others than it was begun with; the global
    generator that they draw from must not notice.

    Args:
        dataloader: what is gone through; torch's data loader, or any iterable.
        order: what a data loader draws an epoch's order from.
    """

    def __init__(self, dataloader: Any, order: Order) -> None:
        self._dataloader = dataloader
        self._order = order
        self._generator = getattr(dataloader, "generator", None)
        self._workers_stay = bool(getattr(dataloader, "persistent_workers", False))
        self._seeds_once = self._workers_stay
        self._has_begun = self._has_workers = False

    def begin(self) -> Iterator[Any]:
        """Begins an epoch."""
        draws = not (self._workers_stay and self._has_workers)
        should_draw = not (self._seeds_once and self._has_begun)
        self._has_begun = self._has_workers = True
        if should_draw and not draws:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if should_draw or not draws:
            return self._turn()
        kept = KeptGenerators([] if self._generator is None else [self._generator])
        self._order.before_draw(kept.put_back)
        iterator = self._turn()
        if not self._order.before_draw(None):
            kept.put_back()
        return iterator

    def go_on(self) -> Iterator[Any]:
        """Begins what is left of an epoch; the global generators stay as they are."""
        kept = KeptGenerators()
        self._has_begun = self._has_workers = True
        iterator = self._turn()
        if not self._order.was_asked:
            # A generator: it would begin, and draw, with its first batch.
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        kept.put_back()
        return iterator

    def state_dict(self) -> dict[str, bool]:
        """Gives what the run has drawn so far, as far as it matters."""
        return {"seeds_once": self._seeds_once, "has_begun": self._has_begun}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Goes on from what `state_dict` gave."""
        self._seeds_once, self._has_begun = state["seeds_once"], state["has_begun"]

    def _turn(self) -> Iterator[Any]:
        turn: Iterator[Any] = iter(self._dataloader)
        return turn
