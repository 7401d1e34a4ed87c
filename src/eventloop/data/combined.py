"""Data loaders made of other loaders: zipped, cycled, limited to the first batches; and `NoData`."""

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
    """Returns a data loader whose batches consist of a batch of each given data loader.

    An epoch ends with the shortest loader; a `cycled` loader never ends. Each loader is resumed as it
    would be without the others.

    Args:
        loaders: data loaders, whose batches come as a tuple; or a single mapping of data loaders.
        named: data loaders by name, whose batches come as a mapping.

    Raises:
        TypeError: there are no loaders, or both kinds, or a loader isn't iterable more than once.
    """
    if len(loaders) == 1 and isinstance(loaders[0], Mapping):
        named = {**loaders[0], **named}
        loaders = ()
    if bool(loaders) == bool(named):
        raise TypeError(
            "zipped takes data loaders, or data loaders by name: zipped(a, b), "
            "zipped(labelled=a, unlabelled=b)"
        )
    loaders_by_name = {str(idx): loader for idx, loader in enumerate(loaders)} or dict(named)
    for name, loader in loaders_by_name.items():
        _require_iterable(loader, f"zipped: {name!r}")
    return Zipped(loaders_by_name, by_name=bool(named))


def cycled(loader: Any) -> Cycled:
    """Returns an endless data loader that restarts the given loader whenever it is exhausted.

    The next epoch of a run continues where the previous epoch stopped, so that all samples are seen
    before any is repeated. Outside of a run each iterator starts over.

    Raises:
        TypeError: the data loader isn't iterable more than once.
    """
    _require_iterable(loader, "cycled")
    return Cycled(loader)


class Combined(Loader):
    """A data loader that is made of other data loaders, and forwards calls to each of them.

    Args:
        parts: the data loaders by name, in order.

    Attributes:
        parts: same as the argument.
        loaders: the `Loader` of each data loader.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.loaders = {name: loader_of(dataloader) for name, dataloader in parts.items()}

    @property
    def dataloader(self) -> Self:
        return self

    def with_parts(self, change: Callable[[int, Loader], Any]) -> Self:
        """Returns a copy with each data loader replaced.

        Args:
            change: returns the new data loader for the position and the `Loader` of the old one.
        """
        combined = copy.copy(self)
        dataloaders = {
            name: change(idx, loader) for idx, (name, loader) in enumerate(self.loaders.items())
        }
        Combined.__init__(combined, dataloaders)
        return combined

    @property
    def may_shard_itself(self) -> bool:  # type: ignore[override]
        """Whether one of the data loaders can only be sharded by itself."""
        return any(loader.may_shard_itself for loader in self.loaders.values())

    def innermost(self) -> Iterator[Loader]:
        for loader in self.loaders.values():
            yield from loader.innermost()

    def fresh_copy(self) -> Self:
        return self.with_parts(lambda idx, loader: loader.fresh_copy())

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders.values():
            loader.set_epoch(epoch)

    def training_shard(self, state: State, seed: int | None = None) -> Self:
        seed = state.settings.seed if seed is None else seed
        return self.with_parts(
            lambda idx, loader: loader.training_shard(state, seed_of_part(seed, idx))
        )

    def evaluation_shard(self, state: State) -> Self:
        if self.is_smaller_than(state.data_world_size):
            return self
        return self.with_parts(lambda idx, loader: loader.evaluation_shard(state))

    def is_smaller_than(self, world_size: int) -> bool:
        return any(loader.is_smaller_than(world_size) for loader in self.loaders.values())


class Zipped(Combined):
    """The data loader that `zipped` returns.

    Args:
        parts: the data loaders by name, in order.
        by_name: whether a batch is a mapping instead of a tuple.
    """

    def __init__(self, parts: Mapping[str, Any], *, by_name: bool) -> None:
        super().__init__(parts)
        self.by_name = by_name

    @property
    def num_batches(self) -> int | None:
        """The number of batches of the shortest data loader; None if it isn't known."""
        return shortest(
            loader.num_batches for loader in self.loaders.values() if not loader.is_endless
        )

    @property
    def is_endless(self) -> bool:  # type: ignore[override]
        """Whether every data loader is endless."""
        return all(loader.is_endless for loader in self.loaders.values())

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        sources = {}
        for idx, (name, loader) in enumerate(self.loaders.items()):
            seed = None if sample_seed is None else seed_of_part(sample_seed, idx)
            sources[name] = loader.source(processes, seed)
        return ZippedSource(self, sources)

    def side_by_side(self, iterators: Mapping[str, Iterator[Any]]) -> Iterator[Any]:
        """Yields batches made of a batch of each iterator, until an iterator is exhausted."""
        # Iterators with an end come first: otherwise a batch that was drawn from an endless iterator
        # would be lost at the end of the epoch.
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
                        f"zipped: {name!r} yielded {describe(batch)}, which can't be matched with the "
                        "other loaders' batches",
                        fix="zip loaders of whole batches, without `collated`",
                    )
            yield batches if self.by_name else tuple(batches.values())

    def split(self, batch: Any, size: int) -> list[Any]:
        """Splits a batch into microbatches, each of which has the same share of every loader's batch.

        A batch of another form, which a plugin has put in its place, is split as usual.

        Args:
            batch: made of a batch of each loader.
            size: the number of samples of the first loader in a microbatch.

        Raises:
            TaskError: a microbatch would end within a sample.
        """
        if not self._is_own(batch) or (samples := self.num_samples(batch)) <= size:
            return split(batch, size)
        batches = batch if self.by_name else dict(zip(self.parts, batch, strict=True))
        pieces = split_side_by_side(batches, samples, size)
        return list(pieces) if self.by_name else [tuple(piece.values()) for piece in pieces]

    def num_samples(self, batch: Any) -> int:
        """Returns the number of samples of a batch, which is the first loader's number."""
        if not self._is_own(batch):
            return num_samples(batch)
        batches = batch.values() if self.by_name else batch
        first_loader = next(iter(self.loaders.values()))
        return first_loader.num_samples(next(iter(batches)))

    def _is_own(self, batch: Any) -> bool:
        """Returns whether a batch has the form of this loader's; a plugin may have replaced it."""
        if self.by_name:
            return isinstance(batch, Mapping) and batch.keys() == self.parts.keys()
        return isinstance(batch, tuple) and len(batch) == len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        iterators = {name: iter(loader.dataloader) for name, loader in self.loaders.items()}
        return self.side_by_side(iterators)


class _OfOne(Combined):
    """A data loader that yields the batches of another data loader."""

    def __init__(self, dataloader: Any) -> None:
        super().__init__({"": dataloader})

    @property
    def part(self) -> Loader:
        """The other data loader."""
        return self.loaders[""]

    def num_samples(self, batch: Any) -> int:
        return self.part.num_samples(batch)

    def split(self, batch: Any, size: int) -> list[Any]:
        return self.part.split(batch, size)


class Cycled(_OfOne):
    """The data loader that `cycled` returns: it restarts another one whenever that is exhausted."""

    is_endless = True

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, because passes over the other data loader are independent of epochs."""

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
    """The first batches of a data loader, in every epoch.

    Args:
        dataloader: an iterable of batches.
        limit: the maximum number of batches.
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
    """The data loader of a run without a data set: empty batches, without an end."""

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


def _require_iterable(loader: Any, subject: str) -> None:
    if isinstance(loader, Iterator):
        raise TypeError(f"{subject} is {a(type(loader).__name__)}, which is used up after one pass")
    if isinstance(loader, (str, Mapping)) or not isinstance(loader, Iterable):
        raise TypeError(f"{subject} is {a(type(loader).__name__)}, not a data loader")
