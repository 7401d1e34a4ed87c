"""Data loaders made of others: zipped, cycled, or limited to the first batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.batches import describe, num_samples
from eventloop.data.microbatch_splitting import split, split_side_by_side
from eventloop.data.microbatches import Microbatches
from eventloop.data.sampler_state import samplers_of
from eventloop.errors import TaskError, a, counted

USED_UP = (
    "use an iterable that can be iterated again, such as a list or a DataLoader; an iterator or a "
    "generator is used up after one pass"
)


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
        named, loaders = {**loaders[0], **named}, ()
    if bool(loaders) == bool(named):
        raise TypeError(
            "zipped takes data loaders, or data loaders by name: zipped(a, b), "
            "zipped(labelled=a, unlabelled=b)"
        )
    parts = {str(idx): one for idx, one in enumerate(loaders)} or dict(named)
    for name, one in parts.items():
        _require_iterable(one, f"zipped: {name!r}")
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


class Zipped:
    """What `zipped` returns.

    Args:
        parts: the data loaders by name, in order.
        by_name: whether a batch is a mapping; a tuple if not.
    """

    def __init__(self, parts: Mapping[str, Any], *, by_name: bool) -> None:
        self.parts = dict(parts)
        self.by_name = by_name

    @property
    def num_batches(self) -> int | None:
        """How many batches the shortest part has; None where that isn't known."""
        return shortest(known_length(one) for one in self.parts.values() if not is_endless(one))

    def with_parts(self, change: Callable[[int, Any], Any]) -> Zipped:
        """Returns one of other parts: those that `change` makes of a part and its number."""
        parts = {name: change(idx, one) for idx, (name, one) in enumerate(self.parts.items())}
        return Zipped(parts, by_name=self.by_name)

    def side_by_side(self, iterators: Mapping[str, Iterator[Any]]) -> Iterator[Any]:
        """Yields batches made of one of each part, until one is exhausted."""
        # Those that end come first: else a batch of an endless one would be lost at the end.
        order = sorted(iterators, key=lambda name: is_endless(self.parts[name]))
        while True:
            found = {}
            for name in order:
                try:
                    found[name] = next(iterators[name])
                except StopIteration:
                    return
            batches = {name: found[name] for name in self.parts}
            for name, one in batches.items():
                if isinstance(one, Microbatches):
                    raise TaskError(
                        f"zipped: {name!r} gave {describe(one)}, which belong to no part of the others",
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
        return list(pieces) if self.by_name else [tuple(one.values()) for one in pieces]

    def num_samples(self, batch: Any) -> int:
        """Returns the number of samples of a batch, which is that of its first part."""
        if not self._is_own(batch):
            return num_samples(batch)
        parts = batch.values() if self.by_name else batch
        first_loader = next(iter(self.parts.values()))
        return sample_counter(first_loader)(next(iter(parts)))

    def _is_own(self, batch: Any) -> bool:
        """Whether a batch has the parts of these loaders; a plugin may have put another in its place."""
        if self.by_name:
            return isinstance(batch, Mapping) and batch.keys() == self.parts.keys()
        return isinstance(batch, tuple) and len(batch) == len(self.parts)

    def __iter__(self) -> Iterator[Any]:
        return self.side_by_side({name: iter(one) for name, one in self.parts.items()})


class Cycled:
    """What `cycled` returns: it restarts a data loader whenever that is exhausted."""

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    def with_parts(self, change: Callable[[int, Any], Any]) -> Cycled:
        """Returns one of another data loader, as `Zipped.with_parts` does."""
        return Cycled(change(0, self.dataloader))

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_empty = True
            for batch in self.dataloader:
                is_empty = False
                yield batch
            if is_empty:
                raise nothing_to_repeat(self.dataloader)


def sample_counter(dataloader: Any) -> Callable[[Any], int]:
    """Returns the function that counts the samples of a data loader's batches."""
    while isinstance(dataloader, (FirstBatches, Cycled)):
        dataloader = dataloader.dataloader
    return dataloader.num_samples if isinstance(dataloader, Zipped) else num_samples


def split_batch(dataloader: Any, batch: Any, size: int) -> list[Any]:
    """Splits a batch of a data loader into microbatches of `size` samples, the last smaller.

    Raises:
        TaskError: it can't be split.
    """
    while isinstance(dataloader, (FirstBatches, Cycled)):
        dataloader = dataloader.dataloader
    if isinstance(dataloader, Zipped):
        return dataloader.split(batch, size)
    if isinstance(dataloader, NoData) and batch == {}:
        raise TaskError(
            f"microbatch_size is {size}, but without a train data loader there is no batch to split",
            fix="leave microbatch_size out, put a batch into `state.batch` in a plugin's `train_batch` "
            "or `after_dataloader`, or implement the action split_batch",
        )
    return split(batch, size)


class NoData:
    """What a run without a data set iterates over: empty batches, without an end."""

    def __iter__(self) -> Iterator[Any]:
        return ({} for _ in itertools.count())


class FirstBatches:
    """The first batches of a data loader, each time it is iterated over.

    Args:
        dataloader: an iterable of batches.
        limit: how many at most.
    """

    def __init__(self, dataloader: Any, limit: int) -> None:
        self.dataloader = dataloader
        self.limit = limit

    @property
    def num_batches(self) -> int | None:
        """How many there are; None if that can't be relied on."""
        length = known_length(self.dataloader)
        return None if length is None else min(self.limit, length)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.dataloader), self.limit)


def known_length(dataloader: Any) -> int | None:
    """Returns the number of batches where it can be relied on: not that of an iterable data set."""
    if isinstance(dataloader, (FirstBatches, Zipped)):
        return dataloader.num_batches
    if isinstance(dataloader, DataLoader) and isinstance(dataloader.dataset, IterableDataset):
        return None
    try:
        return len(dataloader) if isinstance(dataloader, (DataLoader, Sequence)) else None
    except TypeError:  # of a sampler without a length
        return None


def is_endless(dataloader: Any) -> bool:
    """Returns whether a data loader has no end: one that is cycled, or several that all are."""
    if isinstance(dataloader, Zipped):
        return all(map(is_endless, dataloader.parts.values()))
    return isinstance(dataloader, (Cycled, NoData))


def is_map_style(dataloader: Any) -> bool:
    """Returns whether a loader is torch's, or one like it, over a map-style data set."""
    is_loader = isinstance(dataloader, DataLoader)
    return is_loader and not isinstance(dataloader.dataset, IterableDataset)


def first_batch(dataloader: Any) -> tuple[Any, Any]:
    """Returns the first batch, None if there is none, and a data loader that still yields it."""
    # Of a copy, so that persistent workers, which `iter` would reuse, end with it.
    iterator = iter(_copied(dataloader))
    batch = next(iterator, None)
    if iterator is dataloader and batch is not None:
        return batch, itertools.chain([batch], iterator)
    return batch, dataloader


def innermost(dataloader: Any) -> Iterator[Any]:
    """Yields the data loaders that others are made of, or the data loader itself."""
    if isinstance(dataloader, Zipped):
        for one in dataloader.parts.values():
            yield from innermost(one)
    elif isinstance(dataloader, (Cycled, FirstBatches)):
        yield from innermost(dataloader.dataloader)
    else:
        yield dataloader


def tell_epoch(dataloader: Any, epoch: int) -> None:
    """Calls `set_epoch` of samplers, those within others too, and data sets; a cycled loader counts itself."""
    if isinstance(dataloader, Zipped):
        for part in dataloader.parts.values():
            tell_epoch(part, epoch)
    if isinstance(dataloader, FirstBatches):
        tell_epoch(dataloader.dataloader, epoch)
    dataset, *samplers = (
        getattr(dataloader, name, None) for name in ("dataset", "batch_sampler", "sampler")
    )
    found = {id(one): one for sampler in samplers for one in samplers_of(sampler)}
    # Inner ones first: one around them may have set another epoch for them.
    for one in (*reversed(found.values()), dataset):
        if (set_epoch := getattr(one, "set_epoch", None)) is not None:
            set_epoch(epoch)


def nothing_to_repeat(dataloader: Any) -> TaskError:
    """Returns the error of a cycled data loader that has ended without a batch."""
    return TaskError(
        f"cycled: {a(type(dataloader).__name__)} yielded no batch", fix=why_no_batch(dataloader)
    )


def why_no_batch(dataloader: Any) -> str:
    """Returns what to do about a data loader that yielded no batch: it dropped all samples, or is used up."""
    for part in innermost(dataloader):
        if not getattr(part, "drop_last", False):
            continue
        size = getattr(part, "batch_size", None)
        with suppress(TypeError):  # a sampler or a data set without a length
            sampler = getattr(part, "sampler", None)
            num_samples = len(part.dataset if sampler is None else sampler)
            if size is not None and num_samples > 0:
                are_shared = ", divided over the ranks" if num_samples >= size else ""
                return (
                    f"drop_last=True drops a batch of fewer than {size} samples, and there are "
                    f"{num_samples}{are_shared}: give a smaller batch_size, or leave drop_last out"
                )
    return USED_UP


def too_few(what: str, num_batches: int, length: int | None) -> TaskError:
    """Returns the error of a data loader that ended before its length."""
    return TaskError(
        f"the {what} gave {counted(num_batches, 'batch', 'batches')}, but its length is {length}",
        fix="let the data set raise no StopIteration, which ends the data, and make len() of the data "
        "loader the number of batches that it gives",
    )


def shortest(lengths: Iterable[int | None]) -> int | None:
    """Returns the least of several lengths; None if there are none, or one isn't known."""
    known = list(lengths)
    return None if not known or None in known else min(one for one in known if one is not None)


def _copied(dataloader: Any) -> Any:
    if isinstance(dataloader, (Cycled, Zipped)):
        return dataloader.with_parts(lambda idx, part: _copied(part))
    return copy.copy(dataloader) if isinstance(dataloader, DataLoader) else dataloader


def _require_iterable(loader: Any, what: str) -> None:
    if isinstance(loader, Iterator):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, which is used up after one pass")
    if isinstance(loader, (str, Mapping)) or not isinstance(loader, Iterable):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, not a data loader")
