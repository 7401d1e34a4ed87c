"""Batches of a data loader over a map-style data set, from any batch of an epoch on."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    MapDataPipe,
    default_collate,
)

from eventloop.data.draws import may_draw
from eventloop.data.in_memory import gathering
from eventloop.data.positions import MapStylePosition, PassesState
from eventloop.data.resumable_sources import Saved, Source
from eventloop.data.sample_errors import NamedSamples
from eventloop.data.sample_order import Order, sampler_of_user
from eventloop.data.sample_seeds import SampleSeeds, SeededDataset, reads_batches, seeded
from eventloop.data.sampling_state import SamplingState, samplers_of
from eventloop.data.sharding import SHARED, RankPart, UnevenSteps, copy_with, order_as, shared_order
from eventloop.errors import TaskError, counted
from eventloop.forms import as_dict, from_dict
from eventloop.object_state.tracked import TrackedObjects
from eventloop.rng import KeptGenerators, kept_generators

if TYPE_CHECKING:
    from eventloop.data.loaders import MapStyleLoader
    from eventloop.distributed.processes import Processes

# A larger attribute of a data set is taken for a cache, which doesn't belong in a checkpoint.
_MAX_BYTES_OF_DATA = 1024**2


class MapStyleSource(Source):
    """A data loader over a map-style data set, which resumes without reading taken batches again.

    It iterates over a copy of the user's loader, with the sampler replaced by an `Order`, and the data
    set by a `SeededDataset` if it may draw.

    Args:
        loader: the user's loader.
        processes: the ranks, each with its own loader.
        sample_seed: the seed for the draws of the data set; None doesn't seed them.
    """

    kind = "map"

    def __init__(
        self, loader: MapStyleLoader, processes: Processes, sample_seed: int | None
    ) -> None:
        super().__init__(loader)
        dataloader = loader.dataloader
        self._map_style = loader
        self._ranks = processes.data_rank, processes.data_world_size
        self._sampler_name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        sampler = getattr(dataloader, self._sampler_name)
        roots = {"sampler": sampler_of_user(sampler), "generator": dataloader.generator}
        state = SamplingState(roots, loader.datasets)
        self.order = Order(sampler, dataloader.generator, state)
        # Changes that worker processes make to their copies aren't tracked.
        self._data = TrackedObjects(
            {"dataset": dataloader.dataset, "collate_fn": dataloader.collate_fn},
            samplers_of(sampler),
            needs_all=False,
            max_bytes=_MAX_BYTES_OF_DATA,
        )
        self._seeds: SampleSeeds | None = None
        self._loader_in_order = with_gathers(copy_with(dataloader, **self._own_parts(sample_seed)))
        self._passes = LoaderPasses(self._loader_in_order, self.order)
        # Samples of a step over all ranks; None if the user's batch sampler makes the batches.
        self._own_step_size: int | None = None
        if dataloader.batch_size is not None:
            self._own_step_size = dataloader.batch_size * processes.data_world_size
        self._step_size = self._own_step_size
        self._own_order = shared_order(loader)
        self._shared: Saved = self._own_order
        self._part: RankPart | None = None

    def _own_parts(self, sample_seed: int | None) -> dict[str, Any]:
        """Returns the attributes to replace in the copied loader: the sampler, and seeded data."""
        dataloader = self._dataloader
        replacements: dict[str, Any] = {self._sampler_name: self.order}
        if sample_seed is None:
            return replacements
        self._seeds = SampleSeeds(sample_seed, shared=dataloader.num_workers > 0)
        self.order.marks_repeats = self._map_style.may_draw
        # Such a loader seeds samples itself, for example because it reads them in threads.
        if hasattr(dataloader, "sample_seeds"):
            return replacements | {"sample_seeds": self._seeds}
        dataset, collate_fn = seeded(dataloader.dataset, dataloader.collate_fn, self._seeds)
        return replacements | {"dataset": dataset, "collate_fn": collate_fn}

    def _length(self) -> int | None:
        return length_if_known(self._loader_in_order)

    @property
    def even_sizes(self) -> Any:
        steps = self.order.sampler
        loader = self._dataloader
        is_own = loader.collate_fn is not default_collate or reads_batches(loader.dataset)
        if is_own or type(steps) is not BatchSampler:
            return None
        sampler: Any = steps.sampler
        is_even = type(sampler) is DistributedSampler or (
            type(sampler) is RankPart and sampler.even
        )
        return [len(sampler), steps.batch_size, steps.drop_last] if is_even else None

    def _batches(self, epoch: int, num_taken: int | None) -> Iterator[Any]:
        if num_taken is not None:
            return self._passes.resume()
        if self._shared["kind"] == "drawn":
            # The loaded order was a single process's, used to its epoch's end; ranks have their own.
            self._use_order(self._own_order)
        self._set_epoch(epoch)
        self.order.start_epoch()
        return self._passes.start()

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        in_epoch = num_taken is not None
        position = MapStylePosition(
            order=self._shared,
            world_size=self._ranks[1],
            batch_size=self._dataloader.batch_size,
            global_batch_size=self._step_size,
            num_samples=self._map_style.num_samples_of_epoch,
            start=self.order.start if in_epoch else None,
            check=None if num_taken is None else self.order.checksum(self._own(num_taken)),
            now=self.order.state.state_dict(with_global=False),
            passes=self._passes.state(),
            data=self._data.state_dict(),
        )
        return as_dict(position)

    def load_state_dict(self, state: Saved, epoch: int, num_taken: int | None) -> None:
        saved = from_dict(MapStylePosition, state)
        self._passes.load(saved.passes)
        self._keep_step_size(saved)
        if num_taken is not None:
            self._require_same(saved)
        self._data.load_state_dict(saved.data)
        keeps_order = saved.order["kind"] in SHARED and self._step_size is not None
        if num_taken is not None or keeps_order:
            self._use_order(saved.order)
        self._set_epoch(epoch)
        if num_taken is None:
            self.order.state.load_state_dict(saved.now)
            return
        if not self._dataloader.in_order and self._dataloader.num_workers > 1:
            warnings.warn(
                "the train data loader has in_order=False: the batches that were trained on depend "
                "on the speed of its workers, so some batches may be repeated or left out now",
                stacklevel=2,
            )
        # With another number of ranks, this rank had another shard, with another checksum.
        checksum = saved.check if saved.world_size == self._ranks[1] else None
        reads_ahead = self._dataloader.num_workers > 0
        self.order.seek(saved.start, self._own(num_taken), checksum, reads_ahead=reads_ahead)

    def _own(self, num_taken: int) -> int:
        """Returns the number of batches that this rank took without padding."""
        length = self._length()
        return num_taken if length is None else min(num_taken, length)

    def first(self) -> Any:
        in_this_process = {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
        replacements = {"persistent_workers": False, self._sampler_name: [self.order.first]}
        return next(iter(copy_with(self._loader_in_order, **in_this_process, **replacements)))

    def _set_epoch(self, epoch: int) -> None:
        if self._seeds is not None:
            self._seeds.start_epoch(epoch)
        if self._part is not None:
            self._part.set_epoch(epoch)

    def _use_order(self, order: Saved) -> None:
        """Switches to a saved order, which another number of ranks may have begun."""
        loader = self._map_style
        drop_last = self._dataloader.drop_last
        rank, world_size = self._ranks
        step_size = self._step_size
        self._shared = order
        if order == self._own_order and step_size == self._own_step_size:
            self._part = None
            self.order.use(None)
        elif step_size is None or not step_size % world_size:
            size = self._dataloader.batch_size if step_size is None else step_size // world_size
            self._part = order_as(order, loader, rank, world_size)
            self.order.use(BatchSampler(self._part, size, drop_last))
        else:
            self._part = order_as(order, loader, 0, 1)
            self.order.use(UnevenSteps(self._part, rank, world_size, step_size, drop_last))

    def _keep_step_size(self, saved: MapStylePosition) -> None:
        """Keeps the saved number of samples per step, unless another batch_size is set.

        Raises:
            TaskError: a step has fewer samples than there are ranks.
        """
        size = self._dataloader.batch_size
        world_size = self._ranks[1]
        saved_size = saved.global_batch_size
        is_shared = saved.order["kind"] in (*SHARED, "drawn")
        if size is None or saved_size is None or not is_shared or saved.batch_size != size:
            return
        if saved_size < world_size:
            raise TaskError(
                f"the run was begun with {saved_size} samples a step, fewer than the {world_size} ranks",
                fix=f"resume with {saved_size} ranks at most",
            )
        self._step_size = saved_size
        if saved_size != size * world_size and not self._ranks[0]:
            smallest, remainder = divmod(saved_size, world_size)
            or_more = f" or {smallest + 1}" if remainder else ""
            warnings.warn(
                f"batch_size {smallest}{or_more} a rank, not {size}: a step keeps the {saved_size} samples that the "
                f"run was begun with, and now {counted(world_size, 'rank takes', 'ranks take')} them",
                stacklevel=2,
            )

    def _require_same(self, saved: MapStylePosition) -> None:
        """Raises TaskError unless a step takes as many samples as when the epoch began."""
        current_size = self._step_size
        saved_size = saved.global_batch_size
        num_samples = self._map_style.num_samples_of_epoch
        if num_samples != saved.num_samples:
            raise TaskError(
                f"the run was stopped in mid-epoch over {saved.num_samples} samples, and the "
                f"train data set has {num_samples} now",
                fix="resume with the same data, or from a checkpoint at the end of an epoch",
            )
        if current_size == saved_size:
            return
        if saved_size is None:
            fix = "resume with the batch sampler that the run was begun with"
        elif saved_size % self._ranks[1]:
            fix = f"resume with a number of processes that divides {saved_size}"
        else:
            fix = f"set the train data loader's batch_size to {saved_size // self._ranks[1]}"
        sizes = (
            "a batch sampler's batch" if size is None else f"{size} samples"
            for size in (saved_size, current_size)
        )
        message = "the run was stopped in mid-epoch with {} a step, and a step has {} now"
        raise TaskError(message.format(*sizes), fix=fix)


def length_if_known(dataloader: Any) -> int | None:
    """Returns the number of batches, or None if a sampler has no length."""
    try:
        return len(dataloader)
    except TypeError:
        return None


def with_gathers(dataloader: Any) -> Any:
    """Returns a data loader that reads tensors in memory a batch at a time.

    For another data set, it returns a loader whose exceptions name the sample that was read.
    """
    dataset, collate_fn = gathering(dataloader.dataset, dataloader.collate_fn)
    if dataset is dataloader.dataset:
        if isinstance(dataset, (SeededDataset, MapDataPipe)) or not may_draw(dataset):
            return dataloader
        if hasattr(dataloader, "sample_seeds"):
            return dataloader  # it searches its data set for generators, which a wrapper would hide
        dataset = NamedSamples(dataset, in_batches=reads_batches(dataset))
    return copy_with(dataloader, dataset=dataset, collate_fn=collate_fn)


def iterate(dataloader: Any) -> Iterator[Any]:
    """Returns an iterator over a data loader's batches, a faster one for torch's without workers.

    The faster iterator does the same as torch's in a single process, except for a label for the
    profiler, which takes 35 us a batch (checked with torch 2.13). Like torch's, it continues after an
    error.
    """
    if (
        type(dataloader) is not DataLoader
        or dataloader.num_workers
        or dataloader.pin_memory
        or dataloader.batch_sampler is None
        or isinstance(dataset := dataloader.dataset, (IterableDataset, MapDataPipe))
    ):
        return iter(dataloader)
    indices = iter(dataloader.batch_sampler)
    collate = dataloader.collate_fn
    # torch's iterator draws a seed for its workers here, even without workers; results must not differ.
    torch.empty((), dtype=torch.int64).random_(generator=dataloader.generator)
    read = getattr(dataset, "__getitems__", None)

    def batch_of(batch: Any) -> Any:
        return collate([dataset[index] for index in batch] if read is None else read(batch))

    return map(batch_of, indices)


class LoaderPasses:
    """Begins passes over a data loader, making the draws that an uninterrupted run would make.

    At each pass torch's data loader draws a number, the seed of its workers' generators, before it
    draws an order. If workers persist (`persistent_workers`), it draws only at the first pass. A
    resumed run starts workers once more, or has another number of workers, and must not draw for that.
    """

    def __init__(self, dataloader: Any, order: Order) -> None:
        self._dataloader = dataloader
        self._order = order
        self._generator = getattr(dataloader, "generator", None)
        self._persists = self._draws_once = bool(getattr(dataloader, "persistent_workers", False))
        self._has_begun = self._has_workers = False

    def start(self) -> Iterator[Any]:
        """Returns an iterator over a new epoch."""
        draws = not (self._persists and self._has_workers)
        should_draw = not (self._draws_once and self._has_begun)
        self._has_begun = self._has_workers = True
        if should_draw and not draws:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if should_draw or not draws:
            return iterate(self._dataloader)
        saved = KeptGenerators([] if self._generator is None else [self._generator])
        self._order.before_draw = saved.put_back
        iterator = iterate(self._dataloader)
        if self._order.before_draw is not None:
            self._order.before_draw = None
            saved.put_back()
        return iterator

    def resume(self) -> Iterator[Any]:
        """Returns an iterator over the remaining batches of an epoch; global generators don't move."""
        self._has_begun = self._has_workers = True
        with kept_generators():
            iterator = iterate(self._dataloader)
            if not self._order.was_iterated:
                # A generator function begins, and draws, with its first batch: fetch that now, while
                # the generators are kept.
                iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        return iterator

    def state(self) -> PassesState:
        """Returns a record of the workers' seeds that the run has drawn."""
        return PassesState(seeds_once=self._draws_once, has_begun=self._has_begun)

    def load(self, state: PassesState) -> None:
        """Restores the result of `state`."""
        self._draws_once = state.seeds_once
        self._has_begun = state.has_begun
