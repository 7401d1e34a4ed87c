"""Data loaders made of others: several side by side, one again and again, the first batches of one."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from eventloop.data.batches import num_samples, split, split_side_by_side
from eventloop.errors import TaskError, a, counted


def zipped(*loaders: Any, **named: Any) -> Zipped:
    """Returns a data loader of which each batch has one batch of each of these.

    An epoch ends with the shortest; one that is `cycled` never ends. A run that is resumed goes on
    in each of them as it would in that one alone.

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
    """Returns a data loader that begins another one anew whenever that has ended.

    It has no end. In the next epoch of a run it goes on where it was, so that all of its samples
    are seen before any is seen again. Elsewhere, each time it is iterated over, it begins anew.

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
        """Yields batches made of one of each part, until one has ended."""
        # Those that end come first: what an endless one gave beside nothing would be lost.
        order = sorted(iterators, key=lambda name: is_endless(self.parts[name]))
        while True:
            found = {}
            for name in order:
                try:
                    found[name] = next(iterators[name])
                except StopIteration:
                    return
            batches = {name: found[name] for name in self.parts}
            yield batches if self.by_name else tuple(batches.values())

    def split(self, batch: Any, size: int) -> list[Any]:
        """Splits a batch into microbatches, each of which has the same share of every part.

        One that a plugin has put into the place of the batch is split as any other.

        Args:
            size: as `eventloop.data.split` takes it, of the first part.

        Raises:
            TaskError: a microbatch would end within a sample.
        """
        if self.by_name:
            is_mine = isinstance(batch, Mapping) and batch.keys() == self.parts.keys()
        else:
            is_mine = isinstance(batch, tuple) and len(batch) == len(self.parts)
        if not is_mine or (samples := num_samples(batch)) <= size:
            return split(batch, size)
        named = batch if self.by_name else dict(zip(self.parts, batch, strict=True))
        pieces = split_side_by_side(named, samples, size)
        return list(pieces) if self.by_name else [tuple(one.values()) for one in pieces]

    def __iter__(self) -> Iterator[Any]:
        return self.side_by_side({name: iter(one) for name, one in self.parts.items()})


class Cycled:
    """What `cycled` returns.

    Args:
        dataloader: what begins anew.
    """

    def __init__(self, dataloader: Any) -> None:
        self.dataloader = dataloader

    def __iter__(self) -> Iterator[Any]:
        while True:
            is_empty = True
            for batch in self.dataloader:
                is_empty = False
                yield batch
            if is_empty:
                raise nothing_to_repeat(self.dataloader)


def split_batch(dataloader: Any, batch: Any, size: int) -> list[Any]:
    """Splits a batch of a data loader into microbatches of `size` samples, the last smaller.

    Raises:
        TaskError: it can't be split.
    """
    while isinstance(dataloader, FirstBatches):
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
        num_batches: how many there are; None if unknown.
    """

    def __init__(self, dataloader: Any, limit: int, num_batches: int | None) -> None:
        self.dataloader = dataloader
        self.limit = limit
        self.num_batches = None if num_batches is None else min(limit, num_batches)

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
    """Looks at the first batch; gives it and the data loader that still has it.

    A loader that starts anew each time is asked for one that is dropped; an iterator, which
    doesn't, gets it back. The batch is None where there is none.
    """
    # Of copies, so that workers that stay, which `iter` would find again, go with them.
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
    """Tells the number of an epoch to samplers that want it; what is cycled has turns of its own."""
    if isinstance(dataloader, Zipped):
        for one in dataloader.parts.values():
            tell_epoch(one, epoch)
    if isinstance(dataloader, FirstBatches):
        tell_epoch(dataloader.dataloader, epoch)
    for name in ("sampler", "batch_sampler"):
        set_epoch = getattr(getattr(dataloader, name, None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def seed_of_part(seed: int, idx: int) -> int:
    """Returns the seed of a part, so that two over the same data set don't draw alike.

    The first has the seed of the whole, in [0, 2**32) the others.
    """
    digest = hashlib.sha256(f"{seed}/{idx}".encode()).digest()
    return int.from_bytes(digest[:4], "big") if idx else seed


def nothing_to_repeat(dataloader: Any) -> TaskError:
    """Returns the error of a cycled data loader that has ended without a batch."""
    return TaskError(
        f"cycled: {a(type(dataloader).__name__)} gave no batch",
        fix="give an iterable that starts anew each time, such as a list or a DataLoader; an "
        "iterator or a generator is used up after one turn",
    )


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
    if isinstance(dataloader, Zipped):
        return dataloader.with_parts(lambda idx, one: _copied(one))
    if isinstance(dataloader, Cycled):
        return Cycled(_copied(dataloader.dataloader))
    return copy.copy(dataloader) if isinstance(dataloader, DataLoader) else dataloader


def _require_iterable(loader: Any, what: str) -> None:
    if isinstance(loader, Iterator):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, which is used up after one turn")
    if isinstance(loader, (str, Mapping)) or not isinstance(loader, Iterable):
        raise TypeError(f"{what} is {a(type(loader).__name__)}, not a data loader")
