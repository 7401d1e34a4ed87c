"""Random draws of a data set, tied to seed, epoch and index: the same in any worker, in any run."""

from __future__ import annotations

import hashlib
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)

from eventloop.data.batches import shapes
from eventloop.errors import TaskError
from eventloop.rng import KeptGenerators, get_rng_state, is_generator, reseed, set_rng_state

_BITS = 2**64 - 1
_ODD = 0xD1342543DE82EF95  # far from any index


def seeded(
    dataset: Any, collate_fn: Callable[[Any], Any], seeds: SampleSeeds
) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a data set and a collate function whose draws come from `seeds`.

    Those of torch that are known to draw nothing stay as they are. What a user wrote counts as
    drawing: that one sample drew nothing says nothing of the next.
    """
    draws = may_draw(dataset)
    if not draws and collate_fn in (default_collate, default_convert):
        return dataset, collate_fn
    return SeededDataset(dataset, seeds, draws), SeededCollate(collate_fn, seeds)


def may_draw(dataset: Any) -> bool:
    """Returns whether reading a data set may draw random numbers: no, if it is known not to."""
    kind = type(dataset)
    if kind is Subset:
        return may_draw(dataset.dataset)
    if kind is ConcatDataset:
        return any(may_draw(one) for one in dataset.datasets)
    if kind is StackDataset:
        return any(may_draw(one) for one in _stacked(dataset))
    known = (list, tuple, range, dict, Tensor, TensorDataset)
    return kind not in known and not _is_array(dataset)


class SampleSeeds:
    """Seeds the global generators of the host for each sample, from seed, epoch and index.

    Args:
        seed: of the run.
        shared: whether worker processes, which may outlast an epoch, have to see its number.
    """

    def __init__(self, seed: int, *, shared: bool) -> None:
        self._seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64)
        if shared:
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]
        self._base = (-1, 0)
        self._kept: KeptGenerators | None = None
        self._own: list[tuple[Any, Any]] = []

    def start_epoch(self, epoch: int) -> None:
        """Ties what is drawn from now on to this epoch."""
        self._epoch.fill_(epoch)

    def start_batch(self, own: Sequence[Any]) -> None:
        """Begins a batch: in the main process the generators are the training's, and kept.

        Those of the data set are kept, too: the loader may draw its order from one of them.
        """
        epoch = int(self._epoch)
        if self._base[0] != epoch:
            self._base = (epoch, _digest(f"{self._seed}/{epoch}"))
        if get_worker_info() is None:
            self._kept = KeptGenerators()
            self._own = [(one, get_rng_state(one)) for one in own]

    def end_batch(self) -> None:
        """Ends a batch: the generators stand where they stood."""
        if self._kept is not None:
            self._kept.put_back()
            for generator, standing in self._own:
                set_rng_state(generator, standing)
            self._kept = None

    def seed_sample(self, index: Any, own: Sequence[Any]) -> None:
        """Seeds for the sample of an index: the global generators, and the data set's own."""
        seed = _mixed(self._base[1] + _number(index))
        _seed(seed)
        for generator in own:
            reseed(generator, seed)

    def seed_collate(self, first: Any) -> None:
        """Seeds for what becomes of a batch, from the index of its first sample."""
        _seed(_mixed(~self._base[1] + _number(first)))


class SeededDataset:
    """A data set that seeds before it reads; in all else the data set that it was given.

    A data set that reads a whole batch at once is seeded once for it, from its first index.

    Args:
        dataset: map-style.
        seeds: where the seeds come from.
        draws: whether it draws; the collate function alone does, if not.
    """

    __slots__ = ("_batched", "_dataset", "_draws", "_own", "_seeds")

    def __init__(self, dataset: Any, seeds: SampleSeeds, draws: bool) -> None:
        values = {
            "_dataset": dataset,
            "_seeds": seeds,
            "_draws": draws,
            "_batched": _reads_batches(dataset),
            "_own": _generators_of(dataset) if draws else [],
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset, self._seeds, self._draws)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._read(index, lambda: self._sample(index))

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Reads the samples of a batch, as the loader asks for them."""
        return self._read(indices[0], lambda: self._samples(indices))

    def _read(self, first: Any, read: Callable[[], Any]) -> Any:
        seeds = self._seeds
        seeds.start_batch(self._own)
        try:
            found = read()
            seeds.seed_collate(first)
        except BaseException as error:
            seeds.end_batch()
            if isinstance(error, StopIteration):
                raise _no_end(f"the data set {type(self._dataset).__name__}") from error
            raise
        return found

    def _samples(self, indices: Sequence[Any]) -> Any:
        if self._batched:
            if self._draws:
                self._seeds.seed_sample(indices[0], self._own)
            plain = [int(one) if type(one) is Again else one for one in indices]
            return self._dataset.__getitems__(plain)
        return [self._sample(index) for index in indices]

    def _sample(self, index: Any) -> Any:
        if self._draws:
            self._seeds.seed_sample(index, self._own)
        return self._dataset[int(index) if type(index) is Again else index]


class SeededCollate:
    """A collate function whose draws come from the batch's first index; it ends the batch.

    Args:
        collate_fn: the loader's own.
        seeds: those of the data set.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], seeds: SampleSeeds) -> None:
        self._collate_fn = collate_fn
        self._seeds = seeds

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_collate_fn" not in self.__dict__:
            raise AttributeError(name)  # asked while it is unpickled
        return getattr(self._collate_fn, name)

    def __call__(self, samples: Any) -> Any:
        """Makes a batch of samples."""
        try:
            return collated(self._collate_fn, samples)
        finally:
            self._seeds.end_batch()


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Makes a batch of samples; an error says what the function was given.

    Raises:
        TaskError: the function raised StopIteration, which would end the data without a word.
    """
    name = getattr(collate_fn, "__name__", type(collate_fn).__name__)
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise _no_end(f"collate_fn {name}") from error
    except Exception as error:
        error.add_note(f"collate_fn {name} was given {shapes(samples)}")
        raise


def _no_end(who: str) -> TaskError:
    return TaskError(
        f"{who} raised StopIteration, which isn't the end of the data there",
        fix="give the calls of next() in it a default, next(iterator, None), or catch StopIteration",
    )


def _generators_of(dataset: Any) -> list[Any]:
    """Returns the random generators that a data set, or one that it is made of, has as attributes."""
    if type(dataset) is Subset:
        return _generators_of(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = dataset.datasets if type(dataset) is ConcatDataset else _stacked(dataset)
        return [one for part in parts for one in _generators_of(part)]
    return [one for one in getattr(dataset, "__dict__", {}).values() if is_generator(one)]


def _reads_batches(dataset: Any) -> bool:
    """Returns whether a data set reads a batch at once; torch's own do what their parts do."""
    if type(dataset) is Subset:
        return _reads_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        return any(_reads_batches(one) for one in _stacked(dataset))
    return callable(getattr(dataset, "__getitems__", None))


def _stacked(dataset: Any) -> Sequence[Any]:
    parts = dataset.datasets
    return list(parts.values()) if isinstance(parts, Mapping) else parts


def _is_array(dataset: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(dataset) is numpy.ndarray


def _number(index: Any) -> int:
    """Returns a number of an index, another one for each."""
    try:
        number = operator.index(index)
        return number if type(index) is not Again else number + index.times * _ODD
    except TypeError:
        plain = index.tolist() if hasattr(index, "tolist") else index
        return _digest(repr(plain))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(number: int) -> int:
    """Spreads neighbouring numbers over 64 bits.

    Source: splitmix64; Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195.
    """
    number = number * 0x9E3779B97F4A7C15 & _BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _BITS
    return number ^ number >> 31


def _seed(seed: int) -> None:
    """Seeds the host's generators; some 50 times faster than `seed_everything`."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class Again(int):
    """The index of a sample that this epoch has already drawn; a plain int to other code.

    Attributes:
        times: how often it has been given before.
    """

    times: int

    def __new__(cls, index: int, times: int = 0) -> Again:
        """Makes it of the index."""
        made = super().__new__(cls, index)
        made.times = times
        return made


def may_repeat(sampler: Any) -> bool:
    """Returns whether a sampler may give an index twice an epoch: no, if it is known not to.

    A `DistributedSampler` does, to give all ranks as many; those few draw the same again.
    """
    kind = type(sampler)
    if kind is BatchSampler:
        return may_repeat(sampler.sampler)
    if kind is RandomSampler:
        return bool(sampler.replacement) or len(sampler) > len(sampler.data_source)
    return kind not in (SequentialSampler, DistributedSampler)


def numbered(indices: Iterable[Any]) -> Iterator[Any]:
    """Yields indices, or lists of them, with those that come again as `Again`.

    What is not a whole number, such as a name, stays as it is.
    """
    counts: dict[int, int] = {}

    def number(index: Any) -> Any:
        if type(index) is Again:
            return index
        try:
            key = operator.index(index)
        except TypeError:
            return index
        times = counts.get(key, 0)
        counts[key] = times + 1
        return Again(key, times) if times else index

    for one in indices:
        yield [number(index) for index in one] if isinstance(one, (list, tuple)) else number(one)
