"""Seeds the random draws of a data set from seed, epoch and index, the same in any worker and run."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    default_collate,
    default_convert,
    get_worker_info,
)

from eventloop.data.batches import shapes
from eventloop.data.draws import Draws, Read, Seed, may_draw
from eventloop.data.in_memory import StandIn, parts_of
from eventloop.data.sample_errors import note_samples, read_batch, read_samples
from eventloop.errors import TaskError
from eventloop.object_state.tracked import TrackedObjects
from eventloop.object_state.walk import walk
from eventloop.rng import KeptGenerators, is_generator, reseed, seed_of

_BITS = 2**64 - 1
_INT64 = range(-(2**63), 2**63)
_NUM_LOOKS = 3  # batches after which a data set that keeps changing is taken to read seeds
_NOT_KNOWN, _READS_NONE, _READS = range(3)
_KNOWN_COLLATES = (default_collate, default_convert)  # draw nothing
_ODD = 0xD1342543DE82EF95  # far from any index
# The constants of splitmix64.
_GOLDEN, _FACTOR_30, _FACTOR_27 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def seed_of_part(seed: int, idx: int) -> int:
    """Returns a seed for a part of a combined loader, so that equal parts don't draw the same numbers.

    The first part gets `seed` itself, the others a seed in [0, 2**32).
    """
    return seed_of(f"{seed}/{idx}") if idx else seed


def seeded(
    dataset: Any, collate_fn: Callable[[Any], Any], seeds: SampleSeeds
) -> tuple[Any, Callable[[Any], Any]]:
    """Returns a data set and a collate function whose draws come from `seeds`.

    Data sets and collate functions of torch that never draw are returned unchanged.
    """
    draws = may_draw(dataset)
    if not draws and collate_fn in _KNOWN_COLLATES:
        return dataset, collate_fn
    seeds.collates = collate_fn not in _KNOWN_COLLATES
    function = SeededCollate(collate_fn, seeds) if seeds.collates else partial(collate, collate_fn)
    return SeededDataset(dataset, seeds, draws), function


class SampleSeeds:
    """The seeds of samples and batches, and the RNG states to restore after a batch.

    Args:
        seed: the seed of the run.
        shared: whether worker processes have to see a new epoch's number, since they may outlast one.

    Attributes:
        saved: the RNG states before the batch that is being read.
        moved: whether generators may have moved since they were saved.
        collates: whether the batch ends with a collate function that may draw.
        first: the first index of the batch.
    """

    def __init__(self, seed: int, *, shared: bool) -> None:
        self._seed = seed
        # The epoch, and a constant: whether the data set reads seeds.
        self._shared: Any = [0, _NOT_KNOWN]
        if shared:
            self._shared = torch.tensor(self._shared, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        self._base = (-1, 0)
        self.saved: KeptGenerators | None = None
        self.moved = self.collates = False
        self.first: Any = None

    @property
    def epoch(self) -> int:
        """The epoch that draws are tied to."""
        return int(self._shared[0])

    @property
    def reads_seeds(self) -> bool | None:
        """Whether samples depend on seeds of generators that they don't draw from; None if unknown."""
        answer = int(self._shared[1])
        return None if answer == _NOT_KNOWN else answer == _READS

    @reads_seeds.setter
    def reads_seeds(self, reads: bool) -> None:
        self._shared[1] = _READS if reads else _READS_NONE

    def start_epoch(self, epoch: int) -> None:
        """Sets the epoch that draws are tied to."""
        self._shared[0] = epoch
        self._base = (epoch, _digest(f"{self._seed}/{epoch}"))

    def start_batch(self, first_index: Any, dataset_generators: Sequence[Any]) -> KeptGenerators:
        """Begins a batch, and saves the states of all generators.

        Args:
            first_index: the first index of the batch.
            dataset_generators: generators of the data set, which are restored too, because a sampler
                may share them.
        """
        epoch = self.epoch
        if self._base[0] != epoch:
            self._base = (epoch, _digest(f"{self._seed}/{epoch}"))
        self.first = first_index
        self.saved = KeptGenerators(dataset_generators)
        self.moved = True
        return self.saved

    def end_batch(self) -> None:
        """Ends a batch; in the main process, restores the generators that the training draws from."""
        saved = self.saved
        if saved and (self.moved or saved.gpu is not None) and get_worker_info() is None:
            saved.put_back()
        self.saved = None

    def of_sample(self, index: Any) -> int:
        """Returns the seed of the sample at an index."""
        return _mixed(self._base[1] + _number(index))

    def of_samples(self, indices: Sequence[Any]) -> list[int]:
        """Returns the seeds of the samples at these indices; same as `of_sample` for each."""
        are_ints = set(map(type, indices)) == {int}
        if are_ints and min(indices) in _INT64 and max(indices) in _INT64:
            return _mixed_together(self._base[1], indices)
        return [self.of_sample(index) for index in indices]

    def of_collate(self, first_index: Any) -> int:
        """Returns the collate function's seed for a batch that begins with this index."""
        return _mixed(~self._base[1] + _number(first_index))


class SeededDataset(StandIn):
    """Wraps a map-style data set, seeding the generators before each sample is read.

    A data set with `__getitems__` is seeded once for each batch, from the batch's first index.

    Args:
        dataset: the data set.
        seeds: provides the seeds.
        draws: whether the data set may draw; if not, only the collate function is seeded.
    """

    __slots__ = ("_batched", "_draws", "_epoch", "_generators", "_num_looks", "_renews", "_seeds")

    def __init__(self, dataset: Any, seeds: SampleSeeds, draws: bool) -> None:
        super().__init__(
            dataset,
            _seeds=seeds,
            _draws=Draws(f"the data set {type(dataset).__name__}", seeds_all=True)
            if draws
            else None,
            _batched=reads_batches(dataset),
            _generators=[],
            _epoch=None,
            _num_looks=_NUM_LOOKS,
            _renews=False,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._dataset, self._seeds, self._draws is not None)

    def __getitem__(self, index: Any) -> Any:
        return self._read([index], self._samples)[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Reads the samples of a batch, as the loader asks for them."""
        return self._read(indices, self._batch if self._batched else self._samples)

    def _read(self, indices: Sequence[Any], read: Read) -> Any:
        seeds = self._seeds
        draws = self._draws
        if draws is None:
            seeds.start_batch(indices[0], ())
            return self._ended(lambda: read(indices, None), moved=False)
        is_first_of_epoch = self._epoch != seeds.epoch
        if is_first_of_epoch:
            self._start_epoch()
        objects = None
        if draws.seeds_all:
            if seeds.reads_seeds is None:
                objects = TrackedObjects({"dataset": self._dataset})
            else:  # another worker has set it
                self._settle(draws)
        batch = self._drawn(draws, indices, read)
        if is_first_of_epoch or not self._renews:
            # A data set may create a generator when it reads its first sample. After the first batch
            # of an epoch only its attributes are searched, which takes no time.
            generators = generators_in(self._dataset) if is_first_of_epoch else self._attributes()
            if self._take_late(generators):
                batch = self._drawn(draws, indices, read)
                # If there is a new generator again, the data set creates one for each sample. It
                # seeds them itself, so the search ends.
                object.__setattr__(self, "_renews", self._take_late(generators_in(self._dataset)))
        if objects is not None:
            self._look_for_read_seeds(draws, indices[:1], read, objects)
        return batch

    def _look_for_read_seeds(
        self, draws: Draws, indices: Sequence[Any], read: Read, objects: TrackedObjects
    ) -> None:
        """Reads a sample twice more, to see whether it depends on seeds that it doesn't draw from.

        This is possible only if reading doesn't change the data set. A data set that opens files with
        its first sample is tested with the next batch. A data set that changes with each of the first
        batches, by counting or caching, is taken to depend on all seeds.

        Args:
            draws: finds the generators that the data set draws from.
            indices: the index of the sample.
            read: reads it.
            objects: the data set as it was before the batch.
        """
        changes = objects.have_changed()
        object.__setattr__(self, "_num_looks", self._num_looks - 1 if changes else 0)
        if not changes:
            saved = KeptGenerators(self._generators)
            with suppress(Exception):  # the batch itself was read without an error
                self._seeds.reads_seeds = draws.reads_seeds(read, indices)
            saved.put_back()
        self._settle(draws)

    def _settle(self, draws: Draws) -> None:
        """Ends the search for generators whose seeds are read, once the result is known."""
        reads_seeds = self._seeds.reads_seeds
        if reads_seeds or (not self._num_looks and reads_seeds is None):
            draws.take_all()
        elif reads_seeds is not None:
            draws.seeds_all = False

    def _drawn(self, draws: Draws, indices: Sequence[Any], read: Read) -> Any:
        seeds = self._seeds
        saved = seeds.start_batch(indices[0], self._generators)
        batch = self._ended(lambda: draws.run(read, indices, saved), moved=True)
        seeds.moved = bool(self._generators) or draws.moved
        if not seeds.collates and (seeds.moved or saved.gpu is not None):
            seeds.end_batch()
        return batch

    def _take_late(self, generators: Iterable[Any]) -> bool:
        """Adds generators that weren't known yet; returns whether there were any."""
        known_ids = set(map(id, self._generators))
        new_generators = [generator for generator in generators if id(generator) not in known_ids]
        object.__setattr__(self, "_generators", [*self._generators, *new_generators])
        return bool(new_generators)

    def _ended(self, read: Callable[[], Any], *, moved: bool) -> Any:
        """Reads a batch; ends it if reading raises.

        Raises:
            TaskError: the data set raised StopIteration, which would silently end the epoch.
        """
        try:
            samples = read()
        except BaseException as error:
            self._seeds.end_batch()
            if isinstance(error, StopIteration):
                raise _no_end(f"the data set {type(self._dataset).__name__}") from error
            raise
        self._seeds.moved = moved
        return samples

    def _start_epoch(self) -> None:
        """Finds the generators of the data set, and calls `set_epoch` of a persistent worker's copy.

        The main process has called `set_epoch` only on its own copy.
        """
        is_outdated = self._epoch is not None and get_worker_info() is not None
        object.__setattr__(self, "_epoch", self._seeds.epoch)
        if is_outdated and (set_epoch := getattr(self._dataset, "set_epoch", None)) is not None:
            set_epoch(self._epoch)
        object.__setattr__(self, "_generators", generators_in(self._dataset))
        object.__setattr__(self, "_renews", False)

    def _attributes(self) -> Iterator[Any]:
        return filter(is_generator, getattr(self._dataset, "__dict__", {}).values())

    def _batch(self, indices: Sequence[Any], seed: Seed | None) -> Any:
        if seed is not None or self._generators:
            self._seed_all(seed)(self._seeds.of_sample(indices[0]))
        return read_batch(self._dataset, _plain(indices))

    def _samples(self, indices: Sequence[Any], seed: Seed | None) -> list[Any]:
        dataset = self._dataset
        plain = _plain(indices)
        if seed is None and not self._generators:
            return read_samples(dataset, plain)
        seed_all = self._seed_all(seed)
        samples: list[Any] = []
        try:
            for plain_index, number in zip(plain, self._seeds.of_samples(indices), strict=True):
                seed_all(number)
                samples.append(dataset[plain_index])
        except Exception as error:
            note_samples(error, dataset, plain[len(samples) : len(samples) + 1])
            raise
        return samples

    def _seed_all(self, seed: Seed | None) -> Seed:
        """Returns a function that seeds the data set's generators, and calls `seed` if it isn't None."""
        generators = self._generators
        if not generators and seed is not None:
            return seed

        def seed_all(number: int) -> None:
            if seed is not None:
                seed(number)
            for generator in generators:
                reseed(generator, number)

        return seed_all


class SeededCollate:
    """Wraps a collate function, seeding it from the batch's first index; ends the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], seeds: SampleSeeds) -> None:
        self._collate_fn = collate_fn
        self._seeds = seeds
        name = getattr(collate_fn, "__name__", type(collate_fn).__name__)
        self._draws = Draws(f"collate_fn {name}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_collate_fn" not in self.__dict__:
            raise AttributeError(name)  # unpickling asks for attributes before they are set
        return getattr(self._collate_fn, name)

    def __call__(self, samples: Any) -> Any:
        """Makes a batch of samples."""
        seeds = self._seeds
        moved = self._seeds.moved
        try:
            seeds.moved = True
            batch = self._draws.run(self._collate, samples, KeptGenerators())
            seeds.moved = moved or self._draws.moved
            return batch
        finally:
            seeds.end_batch()

    def _collate(self, samples: Any, seed: Seed | None) -> Any:
        if seed is not None:
            seed(self._seeds.of_collate(self._seeds.first))
        return collate(self._collate_fn, samples)


def collate(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Makes a batch of samples; adds the samples' shapes to an error.

    Raises:
        TaskError: the function raised StopIteration, which would silently end the epoch.
    """
    try:
        return collate_fn(samples)
    except Exception as error:
        name = getattr(collate_fn, "__name__", type(collate_fn).__name__)
        if isinstance(error, StopIteration):
            raise _no_end(f"collate_fn {name}") from error
        error.add_note(f"collate_fn {name} was given {shapes(samples)}")
        raise


def _no_end(function_name: str) -> TaskError:
    return TaskError(
        f"{function_name} raised StopIteration, which doesn't end the data there",
        fix="give the calls of next() in it a default, next(iterator, None), or catch StopIteration",
    )


def generators_in(dataset: Any) -> list[Any]:
    """Returns the random generators that are reachable from a data set or used by its methods."""
    return [
        reachable
        for reachable in walk({"dataset": dataset}).objects.values()
        if is_generator(reachable)
    ]


def reads_batches(dataset: Any) -> bool:
    """Returns whether a data set has `__getitems__`; for torch's wrappers, the wrapped ones count."""
    if type(dataset) in (Subset, StackDataset):
        return any(map(reads_batches, parts_of(dataset)))
    return callable(getattr(dataset, "__getitems__", None))


def _number(index: Any) -> int:
    """Returns a number for an index, different for each index."""
    try:
        number = operator.index(index)
        return number if type(index) is not RepeatedIndex else number + index.times * _ODD
    except TypeError:
        plain = index.tolist() if hasattr(index, "tolist") else index
        return _digest(repr(plain))


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _mixed(number: int) -> int:
    """Spreads neighbouring numbers over 64 bits.

    Source: splitmix64; Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195.
    """
    number = number * _GOLDEN & _BITS
    number = (number ^ number >> 30) * _FACTOR_30 & _BITS
    number = (number ^ number >> 27) * _FACTOR_27 & _BITS
    return number ^ number >> 31


def _mixed_together(base: int, indices: Sequence[int]) -> list[int]:
    """Returns `_mixed(base + index)` for each index, ten times faster for a batch of 64."""
    # Multiplication and addition of int64 wrap around, so the bits are those of unsigned numbers.
    numbers = torch.tensor(indices, dtype=torch.int64, device="cpu")
    numbers += _signed(base)
    numbers *= _signed(_GOLDEN)
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(_FACTOR_30)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(_FACTOR_27)
    numbers ^= _shifted(numbers, 31)
    return [number & _BITS for number in numbers.tolist()]


def _signed(number: int) -> int:
    """Returns the int64 with the bits of an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Shifts unsigned numbers to the right; torch's shift of int64 would copy the sign bit."""
    shifted: torch.Tensor = (numbers >> num_bits) & (2 ** (64 - num_bits) - 1)
    return shifted


def _plain(indices: Sequence[Any]) -> Sequence[Any]:
    if not RepeatedIndex.exists or RepeatedIndex not in set(map(type, indices)):
        return indices
    return [int(index) if type(index) is RepeatedIndex else index for index in indices]


class RepeatedIndex(int):
    """The index of a sample that this epoch has already drawn; a plain int to other code.

    Attributes:
        times: how often it was drawn before.
        exists: whether this process has created an instance.
    """

    times: int
    exists = False

    def __new__(cls, index: int, times: int = 0) -> RepeatedIndex:
        """Marks an index as drawn `times` times before."""
        RepeatedIndex.exists = True
        repeated = super().__new__(cls, index)
        repeated.times = times
        return repeated


def may_repeat(sampler: Any) -> bool:
    """Returns whether a sampler may repeat an index within an epoch; False only if it can't.

    A sampler with `start_at(num)`, which begins its next pass `num` samples later, has a fixed order
    for each epoch and doesn't repeat. A `DistributedSampler` counts as not repeating: the few samples
    that it repeats as padding make the same draws again.
    """
    kind = type(sampler)
    if kind is BatchSampler:
        return may_repeat(sampler.sampler)
    if kind is RandomSampler:
        return bool(sampler.replacement) or len(sampler) > len(sampler.data_source)
    return kind not in (SequentialSampler, DistributedSampler) and not hasattr(sampler, "start_at")


def mark_repeats(indices: Iterable[Any]) -> Iterator[Any]:
    """Yields indices, or lists of indices, with repeated integers as `RepeatedIndex`."""
    counts: dict[int, int] = {}

    def number(index: Any) -> Any:
        if type(index) is RepeatedIndex:
            return index
        try:
            key = operator.index(index)
        except TypeError:
            return index
        times = counts.get(key, 0)
        counts[key] = times + 1
        return RepeatedIndex(key, times) if times else index

    for entry in indices:
        yield (
            [number(index) for index in entry]
            if isinstance(entry, (list, tuple))
            else number(entry)
        )
