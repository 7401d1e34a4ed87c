"""The kinds of data loaders: their samplers and lengths, and how ranks share their data.

Only `loader_of` looks at the type of a data loader; everything that depends on the type is a method of
the resulting `Loader`. `combined.py` has the data loaders that eventloop itself provides.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from eventloop.data.batches import num_samples
from eventloop.data.draws import may_draw
from eventloop.data.in_memory import datasets_of
from eventloop.data.iterable_sources import IterableSource
from eventloop.data.map_style import MapStyleSource, length_if_known, with_gathers
from eventloop.data.microbatch_splitting import split
from eventloop.data.resumable_sources import ListSource, Source, StatefulSource
from eventloop.data.sample_seeds import collate
from eventloop.data.sampling_state import Stateful, samplers_of
from eventloop.data.sharding import copy_with, rank_batches, rank_samples
from eventloop.errors import TaskError, counted

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.state import State


def loader_of(dataloader: Any) -> Loader:
    """Returns the `Loader` for a data loader, which may be any iterable of batches."""
    if isinstance(dataloader, Loader):
        return dataloader
    if isinstance(dataloader, DataLoader):
        if isinstance(dataloader.dataset, IterableDataset):
            return IterableLoader(dataloader)
        return MapStyleLoader(dataloader)
    if isinstance(dataloader, Sequence) and not isinstance(dataloader, str):
        return BatchList(dataloader)
    return Loader(dataloader)


class Loader:
    """A data loader of any kind. This base class is for an iterable of unknown type.

    Args:
        dataloader: the iterable of batches.

    Attributes:
        is_endless: whether it has no end.
        is_sharded_here: whether `training_shard` gives each rank its shard, for which all ranks need
            the same data.
        may_shard_itself: whether only the loader itself could shard its data; it may not do so.
    """

    is_endless = False
    is_sharded_here = False
    may_shard_itself = True

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    @property
    def dataloader(self) -> Any:
        """The iterable of batches."""
        return self._dataloader

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch; None if it isn't known for certain."""
        return None

    def innermost(self) -> Iterator[Loader]:
        """Yields the loaders inside a combined loader; the loader itself if it isn't combined."""
        yield self

    def fresh_copy(self) -> Any:
        """Returns a data loader with the same batches and no workers yet."""
        return self.dataloader

    # How training reads it

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        """Returns the source of training batches, which begins at any batch of an epoch.

        Args:
            processes: the ranks, each with its own loader.
            sample_seed: the seed for the draws of a map-style data set; None doesn't seed them.
        """
        if self._saves_position:
            return StatefulSource(self)
        return IterableSource(self)

    @property
    def _saves_position(self) -> bool:
        return isinstance(self.dataloader, Stateful)

    def set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` of its samplers, including nested ones, and of its data set."""
        dataset = getattr(self.dataloader, "dataset", None)
        # Inner samplers first: an outer sampler's set_epoch may set another epoch for them.
        for target in (*reversed(self._samplers()), dataset):
            if (set_epoch := getattr(target, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def _samplers(self) -> list[Any]:
        """Returns its batch sampler, its sampler, and the samplers inside them."""
        samplers = {}
        for name in ("batch_sampler", "sampler"):
            for sampler in samplers_of(getattr(self.dataloader, name, None)):
                samplers[id(sampler)] = sampler
        return list(samplers.values())

    # A static method, because it is called for each batch: it is the function itself.
    num_samples = staticmethod(num_samples)

    def split(self, batch: Any, size: int) -> list[Any]:
        """Splits a batch into microbatches of `size` samples; the last may be smaller.

        Raises:
            TaskError: the batch can't be split.
        """
        return split(batch, size)

    # How ranks share it

    def training_shard(self, state: State, seed: int | None = None) -> Any:
        """Returns the data loader of this rank's shard.

        Args:
            state: has the rank and the settings.
            seed: the seed from which all ranks draw the order; by default the run's.

        Raises:
            TaskError: there are fewer samples than ranks, or a sampler has no length.
        """
        return self.dataloader

    def evaluation_shard(self, state: State) -> Any:
        """Returns a data loader of this rank's shard, so that all ranks together see each sample once.

        A data set with fewer samples than ranks isn't sharded, nor is an iterable of unknown type.
        """
        return self.dataloader

    def is_smaller_than(self, world_size: int) -> bool:
        """Returns whether there are fewer samples than ranks; then each rank evaluates all of them."""
        return False

    # How evaluation reads it

    def for_evaluation(self) -> Any:
        """Returns a data loader with the same batches that is faster and names samples in errors."""
        return self.dataloader


class BatchList(Loader):
    """A sequence of batches; each rank takes every `world_size`-th batch."""

    is_sharded_here = True
    may_shard_itself = False

    @property
    def num_batches(self) -> int | None:
        return len(self.dataloader)

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        return ListSource(self)

    def training_shard(self, state: State, seed: int | None = None) -> Any:
        if isinstance(self.dataloader, tuple) and not self.dataloader:
            return self.dataloader  # the default of a task that is only evaluated
        _require(len(self.dataloader), state.data_world_size, "batch", "batches")
        return self.dataloader[state.data_rank :: state.data_world_size]

    def evaluation_shard(self, state: State) -> Any:
        if self.is_smaller_than(state.data_world_size):
            return self.dataloader
        return self.dataloader[state.data_rank :: state.data_world_size]

    def is_smaller_than(self, world_size: int) -> bool:
        return len(self.dataloader) < world_size


class IterableLoader(Loader):
    """A `DataLoader` over an iterable data set, which has to shard itself by `state.data_rank`."""

    @property
    def _saves_position(self) -> bool:
        # torchdata's loader seeks if its data set is stateful. Otherwise it reads from the start, and
        # may miscount if it does so twice (0.11).
        return super()._saves_position and isinstance(self.dataloader.dataset, Stateful)

    def fresh_copy(self) -> Any:
        # `iter` would reuse persistent workers of the loader; the workers of a copy end with it.
        return copy.copy(self.dataloader)

    def for_evaluation(self) -> Any:
        # A StopIteration of the collate function would silently end the evaluation, and there is no
        # length to compare the number of batches with.
        collate_fn = self.dataloader.collate_fn
        if collate_fn in (default_collate, default_convert):
            return self.dataloader
        return copy_with(self.dataloader, collate_fn=functools.partial(collate, collate_fn))


class MapStyleLoader(IterableLoader):
    """A `DataLoader`, or a similar class, over a map-style data set, sharded by replacing its sampler.

    A sampler with `num_replicas` is kept, because it shards the data itself.
    """

    may_shard_itself = False

    @property
    def num_batches(self) -> int | None:
        return length_if_known(self.dataloader)

    @property
    def datasets(self) -> list[Any]:
        """The data set and, if it is one of torch's wrappers, all data sets inside it."""
        return datasets_of(self.dataloader.dataset)

    @property
    def may_draw(self) -> bool:
        """Whether reading the data set may draw random numbers."""
        return may_draw(self.dataloader.dataset)

    @property
    def num_samples_of_epoch(self) -> int | None:
        """The number of samples of the data set; None if it has no length."""
        dataset = self.dataloader.dataset
        return len(dataset) if isinstance(dataset, Sized) else None

    @property
    def has_plain_batches(self) -> bool:
        """Whether the loader makes batches of its sampler's samples, without the user's batch sampler."""
        return self.dataloader.batch_size is not None or self.dataloader.batch_sampler is None

    @property
    def order_sampler(self) -> Any:
        """The sampler that decides the order: of samples, or the user's batch sampler."""
        return self.dataloader.sampler if self.has_plain_batches else self.dataloader.batch_sampler

    @property
    def num_replicas(self) -> int:
        """The number of ranks that a sampler with `num_replicas` shards for; 0 without one."""
        replicas = (getattr(sampler, "num_replicas", None) for sampler in self._samplers())
        return next(filter(None, replicas), 0)

    @property
    def is_sharded_here(self) -> bool:  # type: ignore[override]
        """Whether no sampler of it shards the data itself."""
        return not self.num_replicas

    def source(self, processes: Processes, sample_seed: int | None) -> Source:
        if self._saves_position:
            return StatefulSource(self)
        return MapStyleSource(self, processes, sample_seed)

    def training_shard(self, state: State, seed: int | None = None) -> Any:
        if self.num_replicas:
            return self.dataloader
        num_ranks = state.data_world_size
        seed = state.settings.seed if seed is None else seed
        if not self.has_plain_batches:
            if self.num_batches is not None:
                _require(self.num_batches, num_ranks, "batch", "batches")
            return rank_batches(self.dataloader, state.data_rank, num_ranks, seed)
        num_drawn = self._num_drawn()
        _require(num_drawn, num_ranks, "sample")
        if state.settings.uneven == "error" and num_drawn % num_ranks:
            raise TaskError(
                f"{counted(num_drawn, 'sample')} can't be split evenly over {num_ranks} ranks",
                fix="set uneven to pad (some are seen twice an epoch) or to drop (some are left out)",
            )
        uneven = state.settings.uneven
        return rank_samples(self.dataloader, state.data_rank, num_ranks, seed, uneven)

    def evaluation_shard(self, state: State) -> Any:
        if self.num_replicas or self.is_smaller_than(state.data_world_size):
            return self.dataloader
        share = rank_samples if self.has_plain_batches else rank_batches
        return share(self.dataloader, state.data_rank, state.data_world_size, state.settings.seed)

    def is_smaller_than(self, world_size: int) -> bool:
        return not self.num_replicas and self._num_drawn() < world_size

    def for_evaluation(self) -> Any:
        return with_gathers(self.dataloader)

    def _num_drawn(self) -> int:
        """Returns the number of samples, or of a batch sampler's batches, that an epoch draws."""
        sampler = self.order_sampler
        try:
            return len(sampler)
        except TypeError as error:
            raise TaskError(
                f"a {type(sampler).__name__} without a length can't be split over ranks",
                fix="give it `__len__`; or `num_replicas`, if it yields only this rank's samples",
            ) from error


def _require(number: int, world_size: int, singular: str, plural: str = "") -> None:
    """Raises TaskError if there are fewer samples or batches than ranks."""
    if number < world_size:
        available = counted(number, singular, plural)
        max_processes = counted(max(number, 1), "process", "processes")
        raise TaskError(
            f"the train data loader has {available}, fewer than the {world_size} ranks",
            fix=f"train in {max_processes} at most, or give it more data",
        )


def first_batch(dataloader: Any) -> tuple[Any, Any]:
    """Returns the first batch, or None without one, and a data loader that still yields it.

    An iterator can't be iterated over twice, so it is returned with its first batch put back.
    """
    iterator = iter(loader_of(dataloader).fresh_copy())
    batch = next(iterator, None)
    if iterator is dataloader and batch is not None:
        return batch, itertools.chain([batch], iterator)
    return batch, dataloader


def known_length(dataloader: Any) -> int | None:
    """Returns the number of batches of a data loader; None if it isn't known for certain."""
    return loader_of(dataloader).num_batches
