"""The order of the samples that a map-style data loader reads in an epoch, from any batch on."""

from __future__ import annotations

import itertools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from eventloop.data.sample_seeds import mark_repeats, may_repeat
from eventloop.data.sampling_state import SamplingState, samplers_of
from eventloop.data.sharding import RankPart, UnevenSteps
from eventloop.errors import TaskError

# Samplers that make all draws of an epoch with their first index, from a generator that is saved.
# Their order can't be disturbed in mid-epoch, so it needs no checksum.
_DRAW_FIRST = (
    list,
    range,
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    RankPart,
    SequentialSampler,
    SubsetRandomSampler,
    UnevenSteps,
    WeightedRandomSampler,
)


class Order(Sampler[Any]):
    """Wraps a loader's sampler, so that an epoch can be resumed by drawing its order again.

    A loader's iterator may be far ahead of the batches it has yielded, so the position in the epoch
    isn't known here.

    Args:
        sampler: the loader's batch sampler; its sampler, if it doesn't make batches.
        generator: the loader's generator, if it has one.
        state: saves that generator, and the user's samplers.

    Attributes:
        sampler: yields the order.
        state: same as the argument.
        start: the state of generators and samplers when the epoch's order was drawn; None before.
        first: the first entry of the epoch, if it is known.
        was_iterated: whether the loader has asked for the rest of the epoch.
        before_draw: called once, before the next epoch's order is drawn.
        marks_repeats: whether to mark an index that is repeated in an epoch.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        generator: torch.Generator | None,
        state: SamplingState,
    ) -> None:
        self.state = state
        self.start: dict[str, Any] | None = None
        self.first: Any = None
        self.was_iterated = self.marks_repeats = False
        self.sampler = self._own = sampler
        self._generator = generator
        self._rest: Iterator[Any] | None = None
        self._checksums = array("L")
        self.before_draw: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # raises TypeError if it has none

    def __iter__(self) -> Iterator[Any]:
        self.was_iterated = True
        return self._new_epoch() if self._rest is None else self._rest

    def use(self, sampler: Iterable[Any] | None) -> None:
        """Takes the order from another sampler; None for the loader's sampler."""
        self.sampler = self._own if sampler is None else sampler

    def start_epoch(self) -> None:
        """Forgets the last epoch; the next iterator begins a new epoch."""
        self.start = self._rest = self.first = None
        self._checksums = array("L")
        self.was_iterated = False

    def checksum(self, num_taken: int) -> int | None:
        """Returns a checksum of the first `num_taken` entries; None if the order needs no checksum."""
        return self._checksums[num_taken - 1] if 0 < num_taken <= len(self._checksums) else None

    def seek(
        self,
        start: Mapping[str, Any] | None,
        num_taken: int,
        checksum: int | None,
        *,
        reads_ahead: bool = True,
    ) -> None:
        """Fast-forwards into an epoch by repeating the sampler's draws.

        Args:
            start: the attribute `start` when the position was saved; None if nothing had been drawn.
            num_taken: the number of entries that were taken.
            checksum: the result of `checksum` for them.
            reads_ahead: whether the loader fetches batches ahead, up to the end, where samplers may
                draw once more.

        Raises:
            TaskError: the order differs from the saved order.
        """
        self.start_epoch()
        if start is None:
            return
        self.state.load_state_dict(start)
        order = self._draw()
        num_drawn = 0
        samples: Any = getattr(self.sampler, "sampler", None)
        if type(self.sampler) is BatchSampler and hasattr(samples, "start_at") and num_taken:
            self.first = next(order)
            samples.start_at(num_taken * self.sampler.batch_size)
            order = self._draw()
            num_taken = 0
            checksum = None
        for entry in itertools.islice(order, num_taken):
            self.first = entry if num_drawn == 0 else self.first
            num_drawn += 1
        if num_drawn < num_taken or (checksum is not None and self.checksum(num_taken) != checksum):
            raise self._other_order(num_taken)
        # The next entry is drawn now, while the generators have the state of that moment.
        first_entries = list(itertools.islice(order, 1)) if reads_ahead or not num_taken else []
        self.start = dict(start)
        rng_state = None if self._generator is None else self._generator.get_state()
        self._rest = self._rest_of_epoch(itertools.chain(first_entries, order), rng_state)

    def _rest_of_epoch(
        self, remaining_entries: Iterator[Any], rng_state: Tensor | None
    ) -> Iterator[Any]:
        # The loader has drawn a seed for its workers by now. It also did when the epoch began, so the
        # generator must not count this draw again.
        if self._generator is not None and rng_state is not None:
            self._generator.set_state(rng_state)
        yield from remaining_entries

    def _new_epoch(self) -> Iterator[Any]:
        # Runs when the first entry is needed: for the first batch, or when workers start.
        if self.before_draw is not None:
            self.before_draw()
            self.before_draw = None
        self.start = self.state.state_dict(with_global=True)
        yield from self._draw()

    def _draw(self) -> Iterator[Any]:
        """Draws an epoch's order from the current states of generators and samplers."""
        order = iter(self.sampler)
        samplers = samplers_of(self.sampler)
        sees_all = not any(type(sampler) is RankPart for sampler in samplers)
        if self.marks_repeats and sees_all and may_repeat(self.sampler):
            order = mark_repeats(order)
        draws_first = all(
            type(sampler) in _DRAW_FIRST or hasattr(sampler, "start_at") for sampler in samplers
        )
        return order if draws_first else self._summed(order)

    def _summed(self, order: Iterator[Any]) -> Iterator[Any]:
        checksum = 0
        for entry in order:
            checksum = zlib.crc32(repr(entry).encode(), checksum)
            self._checksums.append(checksum)
            yield entry

    def _other_order(self, num_taken: int) -> TaskError:
        names = ", ".join(type(sampler).__qualname__ for sampler in samplers_of(self.sampler))
        return TaskError(
            f"the order of the train data loader ({names}) differs from the order that the epoch began "
            f"with, of which {num_taken} batches were trained on",
            fix="let samplers draw from their own generator, which nothing else draws from during the "
            "epoch, or give them state_dict and load_state_dict; then resume from a checkpoint at the "
            "end of an epoch",
        )


def sampler_of_user(sampler: Any) -> Any:
    """Returns the innermost sampler, inside samplers that only make batches or shards of its samples."""
    while type(sampler) in (BatchSampler, RankPart, UnevenSteps):
        sampler = sampler.sampler
    return sampler
