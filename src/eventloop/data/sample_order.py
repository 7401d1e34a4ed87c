"""The order of an epoch: which samples a map-style data loader reads, from any batch on."""

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

# Those that draw all that they need with their first index, from no hidden source.
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
    """Wraps a loader's sampler, so that an epoch can be resumed by drawing its order once more.

    A loader's iterator may be far ahead of what it has yielded: the position isn't known here.

    Args:
        sampler: the loader's batch sampler; its sampler, if it makes no batches.
        generator: the loader's own, if it has one.
        state: of that generator, and of the user's samplers.

    Attributes:
        sampler: where the order comes from.
        state: as given.
        start: the state of generators and samplers when the epoch's order was drawn; None before.
        first: the first entry of the epoch, if it is known.
        was_iterated: whether the loader has asked for the rest of the epoch.
        before_draw: called once, before the next epoch's order is drawn.
        marks_repeats: whether an index that comes again in an epoch is marked.
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
        return len(self.sampler)  # type: ignore[arg-type]  # the loader asks only where it has one

    def __iter__(self) -> Iterator[Any]:
        self.was_iterated = True
        return self._new_epoch() if self._rest is None else self._rest

    def use(self, sampler: Iterable[Any] | None) -> None:
        """Takes the order from another sampler; None for the loader's own."""
        self.sampler = self._own if sampler is None else sampler

    def start_epoch(self) -> None:
        """Forgets the last epoch: the next iterator begins one."""
        self.start = self._rest = self.first = None
        self._checksums = array("L")
        self.was_iterated = False

    def checksum(self, num_taken: int) -> int | None:
        """Returns a checksum of the order up to here; None if it can't have been disturbed."""
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
            start: the attribute, when the position was saved; None if nothing had been drawn.
            num_taken: how many entries were taken.
            checksum: what `checksum` returned for them.
            reads_ahead: whether the loader fetches batches ahead, up to the end, where samplers may
                draw once more.

        Raises:
            TaskError: the order isn't the saved one.
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
        # Drawn now, while the generators are as they were then.
        ahead = list(itertools.islice(order, 1)) if reads_ahead or not num_taken else []
        self.start = dict(start)
        rng_state = None if self._generator is None else self._generator.get_state()
        self._rest = self._rest_of_epoch(itertools.chain(ahead, order), rng_state)

    def _rest_of_epoch(self, rest: Iterator[Any], rng_state: Tensor | None) -> Iterator[Any]:
        # By now the loader has drawn a seed for its workers, which it had when the epoch began.
        if self._generator is not None and rng_state is not None:
            self._generator.set_state(rng_state)
        yield from rest

    def _new_epoch(self) -> Iterator[Any]:
        # Runs when the first is asked for: by the first batch, or by workers when they start.
        if self.before_draw is not None:
            self.before_draw()
            self.before_draw = None
        self.start = self.state.state_dict(with_global=True)
        yield from self._draw()

    def _draw(self) -> Iterator[Any]:
        """Draws an epoch's order from the current states of generators and samplers."""
        order = iter(self.sampler)
        samplers = samplers_of(self.sampler)
        sees_all = not any(type(one) is RankPart for one in samplers)
        if self.marks_repeats and sees_all and may_repeat(self.sampler):
            order = mark_repeats(order)
        draws_first = all(type(one) in _DRAW_FIRST or hasattr(one, "start_at") for one in samplers)
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
            f"the order of the train data loader ({names}) isn't the one that the epoch began with, of "
            f"which {num_taken} batches were trained on",
            fix="let samplers draw from a generator of their own, not from one that the training draws "
            "from in between, or have state_dict and load_state_dict; then resume from a checkpoint at "
            "the end of an epoch",
        )


def sampler_of_user(sampler: Any) -> Any:
    """Returns the sampler inside those that make batches and shards of its samples, and keep no state."""
    while type(sampler) in (BatchSampler, RankPart, UnevenSteps):
        sampler = sampler.sampler
    return sampler
