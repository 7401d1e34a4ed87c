"""Data loaders that eventloop makes: of others, zipped, cycled or limited to the first batches, and of nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from eventloop.data.batches import describe, num_samples
from eventloop.data.loaders import Loader, loader_of
from eventloop.data.microbatch_splitting import split, split_side_by_side
from eventloop.data.microbatches import Microbatches
from eventloop.data.resumable_sources import CycledSource, Source, ZippedSource, shortest
from eventloop.data.sample_seeds import seed_of_part
from eventloop.data.too_few_batches import nothing_to_repeat
from eventloop.errors import TaskError, a

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State


def zipped(*loaders: Any, **named: Any) -> Zipped:
    """Returns a data loader of which each batch has one batch of each of these.

    An epoch ends with the shortest; one that is `cycled` never ends. Each is resumed as it would be
    alone.

    Args:
        loaders: data loaders, whose batches come as a tuple; or one mapping of them.
        named: data loaders by name, whose batches come as a mapping.

    Raises:
        TypeError: there are none, both kinds, or one that isn't iterable, or only once.
    """
    if len(loaders) == 1 and isinstance(loaders[0], Mapping):
        named = {**loaders[0], **named}
        loaders = ()
    if bool(loaders) == bool(named):
        raise TypeError(
            "zipped takes data loaders, or data loaders by name: zipped(a, b), "
            "zipped(labelled=a, unlabelled=b)"
        )
    parts = {str(idx): loader for idx, loader in enumerate(loaders)} or dict(named)
    for name, loader in parts.items():
        _require_iterable(loader, f"zipped: {name!r}")
    return Zipped(parts, by_name=bool(named))


def cycled(loader: Any) -> Cycled:
    """Returns a data loader without an end, which restarts another one when that is exhausted.

    The next epoch of a run continues where the last one stopped, so that all samples are seen before
    any is repeated. Outside of a run each iterator starts over.

    Raises:
        TypeError: the data loader isn't iterable, or only once.
    """
    _require_iterable(loader, "cycled")
    return Cycled(loader)


class Combined(Loader):
    """A data loader that is made of others, and does with each of them what is asked of it.

    Args:
        parts: the data loaders by name, in order.

    Attributes:
        parts: likewise.
        loaders: what is known of them.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.loaders = {name: loader_of(part) for name, part in parts.items()}

    @property
    def dataloader(self) -> Self:
        return self

    def with_parts(self, change: Callable[[int, Loader], Any]) -> Self:
        """Returns one of other parts: those that `change` makes of a part and its number."""
        other = copy.copy(self)
        parts = {name: change(idx, part) for idx, (name, part) in enumerate(self.loaders.items())}
        Combined.__init__(other, parts)
        return other

    @property
    def may_shard_itself(self) -> bool:  # type: ignore[override]
        """Whether only one of the parts itself can give each rank its part."""
        return any(part.may_shard_itself for part in self.loaders.values())

    def innermost(self) -> Iterator[Loader]:
        for part in self.loaders.values():
            yield from part.innermost()

    def fresh_copy(self) -> Self:
        return self.with_parts(lambda idx, part: part.fresh_copy())

    def set_epoch(self, epoch: int) -> None:
        for part in self.loaders.values():
            part.set_epoch(epoch)

    def training_shard(self, state: State, seed: int | None = None) -> Self:
        seed = state.settings.seed if seed is None else seed
        return self.with_parts(
            lambda idx, part: part.training_shard(state, seed_of_part(seed, idx))
        )

    def evaluation_shard(self, state: State) -> Self:
        if self.is_smaller_than(state.data_world_size):
            return self
        return self.with_parts(lambda idx, part: part.evaluation_shard(state))

    def is_smaller_than(self, world_size: int) -> bool:
        return any(part.is_smaller_than(world_size) for part in self.loaders.values())


class Zipped(Combined):
    """What `zipped` returns.

    Args:
        parts: the data loaders by name, in order.
        by_name: whether a batch is a mapping; a tuple if not.
    """

    def __init__(self, parts: Mapping[str, Any], *, by_name: bool) -> None:
        super().__init__(parts)
        self.by_name = by_name

    @property
    def num_batches(self) -> int | None:
        """How many batches the shortest part has; None where that isn't known."""
        return shortest(part.num_batches for part in self.loaders.values() if not part.is_endless)

    @property
    def is_endless(self) -> bool:  # type: ignore[override]
        """Whether no part has an end."""
        return all(part.is_endless for part in self.loaders.values())

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        sources = {}
        for idx, (name, part) in enumerate(self.loaders.items()):
            seed = None if sample_seed is None else seed_of_part(sample_seed, idx)
            sources[name] = part.source(processes, seed)
        return ZippedSource(self, sources)

    def side_by_side(self, iterators: Mapping[str, Iterator[Any]]) -> Iterator[Any]:
        """Yields batches made of one of each part, until one is exhausted."""
        # Those that end come first: else a batch of an endless one would be lost at the end.
        order = sorted(iterators, key=lambda name: self.loaders[name].is_endless)
        while True:
            drawn = {}
            for name in order:
                try:
                    drawn[name] = next(iterators[name])
                except StopIteration:
                    return
            batches = {name: drawn[name] for name in self.parts}
            for name, batch in batches.items():
                if isinstance(batch, Microbatches):
                    raise TaskError(
                        f"zipped: {name!r} gave {describe(batch)}, which belong to no part of the others",
                        fix="give zipped loaders of whole batches, without `collated`",
                    )
            yield batches if self.by_name else tuple(batches.values())

    def split(self, batch: Any, size: int) -> list[Any]:
        """Splits a batch into microbatches, each of which has the same share of every part.

        Another batch, which a plugin has put in its place, is split as usual. The size is that of the
        first part.

        Raises:
            TaskError: a microbatch would end within a sample.
        """
        if not self._is_own(batch) or (samples := self.num_samples(batch)) <= size:
            return split(batch, size)
        named = batch if self.by_name else dict(zip(self.parts, batch, strict=True))
        pieces = split_side_by_side(named, samples, size)
        return list(pieces) if self.by_name else [tuple(piece.values()) for piece in pieces]

    def num_samples(self, batch: Any) -> int:
        """Returns the number of samples of a batch, which is that of its first part."""
        if not self._is_own(batch):
            return num_samples(batch)
        batches = batch.values() if self.by_name else batch
        first_part = next(iter(self.loaders.values()))
        return first_part.num_samples(next(iter(batches)))

    def _is_own(self, batch: Any) -> bool:
        """Whether a batch has the parts of these loaders; a plugin may have put another in its place."""
        if self.by_name:
            return isinstance(batch, Mapping) and batch.keys() == self.parts.keys()
        return isinstance(batch, tuple) and len(batch) == len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        iterators = {name: iter(part.dataloader) for name, part in self.loaders.items()}
        return self.side_by_side(iterators)


class _OfOne(Combined):
    """A data loader that is made of another one, whose batches it yields."""

    def __init__(self, dataloader: Any) -> None:
        super().__init__({"": dataloader})

    @property
    def part(self) -> Loader:
        """The other one."""
        return self.loaders[""]

    def num_samples(self, batch: Any) -> int:
        return self.part.num_samples(batch)

    def split(self, batch: Any, size: int) -> list[Any]:
        return self.part.split(batch, size)


class Cycled(_OfOne):
    """What `cycled` returns: it restarts a data loader whenever that is exhausted."""

    is_endless = True

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: its passes over the other one are counted apart from the run's epochs."""

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        return CycledSource(self, self.part.source(processes, sample_seed))

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_empty = True
            for batch in self.part.dataloader:
                is_empty = False
                yield batch
            if is_empty:
                raise nothing_to_repeat(self.part)


class FirstBatches(_OfOne):
    """The first batches of a data loader, each time it is iterated over.

    Args:
        dataloader: an iterable of batches.
        limit: how many at most.
    """

    def __init__(self, dataloader: Any, limit: int) -> None:
        super().__init__(dataloader)
        self.limit = limit

    @property
    def num_batches(self) -> int | None:
        length = self.part.num_batches
        return None if length is None else min(self.limit, length)

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        source = self.part.source(processes, sample_seed)
        source.limit = self.limit
        return source

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.part.dataloader), self.limit)


class NoData(Loader):
    """What a run without a data set iterates over: empty batches, without an end."""

    is_endless = True
    may_shard_itself = False

    def __init__(self) -> None:
        pass

    @property
    def dataloader(self) -> Self:
        return self

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        return Source(self)

    def split(self, batch: Any, size: int) -> list[Any]:
        if batch != {}:
            return split(batch, size)
        raise TaskError(
            f"microbatch_size is {size}, but without a train data loader there is no batch to split",
            fix="leave microbatch_size out, put a batch into `state.batch` in a plugin's `train_batch` "
            "or `after_dataloader`, or implement the action split_batch",
        )

    def __iter__(self) -> Iterator[Any]:
        return ({} for _ in itertools.count())


def _require_iterable(loader: Any, what: str) -> None:
    if isinstance(loader, Iterator):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, which is used up after one pass")
    if isinstance(loader, (str, Mapping)) or not isinstance(loader, Iterable):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, not a data loader")
