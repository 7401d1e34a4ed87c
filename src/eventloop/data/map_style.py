"""Batches of a data loader over a map-style data set, from any batch of an epoch on."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sized
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

from eventloop.data.combine import known_length
from eventloop.data.in_memory import gathering
from eventloop.data.sample_order import Order
from eventloop.data.sample_seeds import SampleSeeds, may_draw, reads_batches, seeded
from eventloop.data.sharding import LASTING, RankPart, order_as, shared_order
from eventloop.data.uneven_steps import UnevenSteps
from eventloop.errors import TaskError, counted
from eventloop.rng import KeptGenerators

if TYPE_CHECKING:
    from eventloop.data.sample_order import Order
    from eventloop.distributed.processes import Processes

Saved = Mapping[str, Any]


class MapStyle:
    """A data loader over a map-style data set: what was taken isn't read again.

    It is iterated over as a copy with an order, and where it may draw a data set, of its own; the
    user's loader stays as it is.

    Args:
        dataloader: the user's.
        sample_seed: what the draws of the data set are tied to; None leaves them alone.
    """

    kind = "map"
    suits_any_ranks = has_first = True
    doubts: tuple[str, ...] = ()

    def __init__(self, dataloader: Any, processes: Processes, sample_seed: int | None) -> None:
        makes_batches = dataloader.batch_sampler is not None
        self._sampler_name = "batch_sampler" if makes_batches else "sampler"
        self._dataloader = dataloader
        self._ranks = processes.rank, processes.world_size
        self._seeds: SampleSeeds | None = None
        self.order = Order(getattr(dataloader, self._sampler_name), dataloader.generator)
        parts: dict[str, Any] = {self._sampler_name: self.order}
        if sample_seed is not None:
            self._seeds = SampleSeeds(sample_seed, shared=dataloader.num_workers > 0)
            dataset, collate_fn = seeded(dataloader.dataset, dataloader.collate_fn, self._seeds)
            parts |= {"dataset": dataset, "collate_fn": collate_fn}
            self.order.numbers = may_draw(dataloader.dataset)
        self._loader = with_gathers(copy_with(dataloader, **parts))
        self._turns = Turns(self._loader, self.order)
        size = dataloader.batch_size
        # How many samples a step has; None where the batches are a batch sampler's.
        self._own_step_size: int | None = None if size is None else size * processes.world_size
        self._step_size = self._own_step_size
        self._own_order = shared_order(dataloader)
        self._shared: Saved = self._own_order
        self._part: RankPart | None = None

    @property
    def num_batches(self) -> int | None:
        return known_length(self._loader)

    @property
    def even_sizes(self) -> Any:
        steps, loader = self.order.inner, self._dataloader
        is_own = loader.collate_fn is not default_collate or reads_batches(loader.dataset)
        if is_own or type(steps) is not BatchSampler:
            return None
        sampler: Any = steps.sampler
        is_even = type(sampler) is DistributedSampler or (
            type(sampler) is RankPart and sampler.even
        )
        return [len(sampler), steps.batch_size, steps.drop_last] if is_even else None

    def start(self, epoch: int) -> Iterator[Any]:
        if self._shared["kind"] == "drawn":
            # Where one process began the epoch that several ended, they begin theirs.
            self._order_as(self._own_order)
        self._tell_epoch(epoch)
        self.order.begin()
        return self._turns.begin()

    def look_ahead(self, num_taken: int) -> None:
        pass

    def state_dict(self, num_taken: int | None) -> dict[str, Any]:
        return {
            "order": self._shared,
            "world_size": self._ranks[1],
            "batch_size": self._dataloader.batch_size,
            "global_batch_size": self._step_size,
            "num_samples": self._num_samples,
            "start": None if num_taken is None else self.order.start,
            "check": None if num_taken is None else self.order.check(self._own(num_taken)),
            "now": self.order.standing(shared=False),
            "turns": self._turns.state_dict(),
        }

    def load(self, saved: Saved, epoch: int, num_taken: int | None) -> None:
        self._turns.load_state_dict(saved["turns"])
        self._keep_step_size(saved)
        if num_taken is not None:
            self._require_same(saved)
            self._order_as(saved["order"])
        elif saved["order"]["kind"] in LASTING and self._step_size is not None:
            self._order_as(saved["order"])
        self._tell_epoch(epoch)
        if num_taken is None:
            self.order.put(saved["now"])
            return
        if not self._dataloader.in_order and self._dataloader.num_workers > 1:
            warnings.warn(
                "the train data loader has in_order=False: which batches were trained on depends "
                "on the speed of its workers, so that some may be repeated or left out now",
                stacklevel=2,
            )
        # Other ranks had other parts of the same order.
        check = saved["check"] if saved["world_size"] == self._ranks[1] else None
        reads_ahead = self._dataloader.num_workers > 0
        self.order.seek(saved["start"], self._own(num_taken), check, reads_ahead=reads_ahead)

    def rest(self) -> Iterator[Any]:
        return self._turns.go_on()

    def _own(self, num_taken: int) -> int:
        """Returns how many batches of its own a rank took: one that had run out repeated its first."""
        num_batches = self.num_batches
        return num_taken if num_batches is None else min(num_taken, num_batches)

    def first(self) -> Any:
        loader = copy_with(
            self._loader,
            num_workers=0,
            prefetch_factor=None,
            timeout=0,
            persistent_workers=False,
            **{self._sampler_name: [self.order.first]},
        )
        return next(iter(loader))

    @property
    def _num_samples(self) -> int | None:
        dataset = self._dataloader.dataset
        return len(dataset) if isinstance(dataset, Sized) else None

    def _tell_epoch(self, epoch: int) -> None:
        if self._seeds is not None:
            self._seeds.start_epoch(epoch)
        if self._part is not None:
            self._part.set_epoch(epoch)

    def _order_as(self, order: Saved) -> None:
        """Takes the order that these ranks, or others, had."""
        loader, (rank, world_size), step_size = self._dataloader, self._ranks, self._step_size
        self._shared = order
        if order == self._own_order and step_size == self._own_step_size:
            self._part = None
            self.order.take_from(None)
        elif step_size is None or not step_size % world_size:
            size = loader.batch_size if step_size is None else step_size // world_size
            self._part = order_as(order, loader, rank, world_size)
            self.order.take_from(BatchSampler(self._part, size, loader.drop_last))
        else:
            self._part = order_as(order, loader, 0, 1)
            self.order.take_from(
                UnevenSteps(self._part, rank, world_size, step_size, loader.drop_last)
            )

    def _keep_step_size(self, saved: Saved) -> None:
        """Has a step take as many samples as before, unless another batch_size is asked for."""
        size, world_size = self._dataloader.batch_size, self._ranks[1]
        then = saved["global_batch_size"]
        is_shared_here = saved["order"]["kind"] in (*LASTING, "drawn")
        if size is None or not is_shared_here or saved.get("batch_size") != size:
            return
        if then < world_size:
            raise TaskError(
                f"the run was begun with {then} samples a step, fewer than the {world_size} ranks",
                fix=f"go on with {then} ranks at most",
            )
        self._step_size = then
        if then != size * world_size and not self._ranks[0]:
            least, rest = divmod(then, world_size)
            or_more = f" or {least + 1}" if rest else ""
            warnings.warn(
                f"batch_size {least}{or_more} a rank, not {size}: a step keeps the {then} samples that the "
                f"run was begun with, and now {counted(world_size, 'rank takes', 'ranks take')} them",
                stacklevel=2,
            )

    def _require_same(self, saved: Saved) -> None:
        """Checks that a step takes the samples that it took when the epoch began."""
        mine, theirs = self._step_size, saved["global_batch_size"]
        if self._num_samples != saved["num_samples"]:
            raise TaskError(
                f"the run was stopped in mid-epoch over {saved['num_samples']} samples, and the "
                f"train data set has {self._num_samples} now",
                fix="go on with the same data, or from a checkpoint at the end of an epoch",
            )
        if mine != theirs:
            raise TaskError(
                f"the run was stopped in mid-epoch with {_size(theirs)} a step, and a step has "
                f"{_size(mine)} now",
                fix=_fix_for_size(theirs, self._ranks[1]),
            )


def _size(global_batch_size: int | None) -> str:
    return (
        "a batch sampler's batch" if global_batch_size is None else f"{global_batch_size} samples"
    )


def _fix_for_size(global_batch_size: int | None, world_size: int) -> str:
    if global_batch_size is None:
        return "go on with the batch sampler that the run was begun with"
    if global_batch_size % world_size:
        return f"go on with a number of processes that divides {global_batch_size}"
    return f"set the train data loader's batch_size to {global_batch_size // world_size}"


def copy_with(dataloader: Any, **parts: Any) -> Any:
    """Returns a data loader with other parts, of the same class and with all its attributes.

    torch forbids to set the parts once a loader is built, because its batch sampler would keep the
    old ones; the whole order is set here. `_iterator` (checked with torch 2.13) holds workers that
    stay, which would go on with the old parts.
    """
    copied = copy.copy(dataloader)
    for name, value in {**parts, "_iterator": None}.items():
        object.__setattr__(copied, name, value)
    return copied


def with_gathers(dataloader: Any) -> Any:
    """Returns a data loader as one that reads tensors in memory a batch at a time."""
    dataset, collate_fn = gathering(dataloader.dataset, dataloader.collate_fn)
    if dataset is dataloader.dataset:
        return dataloader
    return copy_with(dataloader, dataset=dataset, collate_fn=collate_fn)


def iterate(dataloader: Any) -> Iterator[Any]:
    """Returns an iterator over a data loader's batches; of torch's own without workers, a faster one.

    It does what torch's does in one process, but for a label of the profiler, which takes 35 us a
    batch (checked with torch 2.13). Like torch's, it goes on after an error.
    """
    if (
        type(dataloader) is not DataLoader
        or dataloader.num_workers
        or dataloader.pin_memory
        or dataloader.batch_sampler is None
        or isinstance(dataset := dataloader.dataset, (IterableDataset, MapDataPipe))
    ):
        return iter(dataloader)
    indices, collate = iter(dataloader.batch_sampler), dataloader.collate_fn
    torch.empty((), dtype=torch.int64).random_(generator=dataloader.generator)  # as for workers
    read = getattr(dataset, "__getitems__", None)

    def batch_of(batch: Any) -> Any:
        return collate([dataset[index] for index in batch] if read is None else read(batch))

    return map(batch_of, indices)


class Turns:
    """Begins turns through a data loader.

    Each turn of torch's data loader draws a number, the seed of its workers' generators, before it
    draws an order; where workers stay (`persistent_workers`), only the first one does. A run that
    was stopped starts workers once more, or has others than it was begun with; the global
    generator that they draw from must not notice.

    Args:
        dataloader: what is gone through; torch's data loader, or any iterable.
        order: what a data loader draws an epoch's order from.
    """

    def __init__(self, dataloader: Any, order: Order) -> None:
        self._dataloader = dataloader
        self._order = order
        self._generator = getattr(dataloader, "generator", None)
        self._workers_stay = bool(getattr(dataloader, "persistent_workers", False))
        self._seeds_once = self._workers_stay
        self._has_begun = self._has_workers = False

    def begin(self) -> Iterator[Any]:
        draws = not (self._workers_stay and self._has_workers)
        should_draw = not (self._seeds_once and self._has_begun)
        self._has_begun = self._has_workers = True
        if should_draw and not draws:
            torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        if should_draw or not draws:
            return self._turn()
        kept = KeptGenerators([] if self._generator is None else [self._generator])
        self._order.before_draw(kept.put_back)
        iterator = self._turn()
        if not self._order.before_draw(None):
            kept.put_back()
        return iterator

    def go_on(self) -> Iterator[Any]:
        """Begins what is left of an epoch; the global generators stay as they are."""
        kept = KeptGenerators()
        self._has_begun = self._has_workers = True
        iterator = self._turn()
        if not self._order.was_asked:
            # A generator: it would begin, and draw, with its first batch.
            iterator = itertools.chain(list(itertools.islice(iterator, 1)), iterator)
        kept.put_back()
        return iterator

    def state_dict(self) -> dict[str, bool]:
        """Returns what the run has drawn so far, as far as it matters."""
        return {"seeds_once": self._seeds_once, "has_begun": self._has_begun}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        self._seeds_once, self._has_begun = state["seeds_once"], state["has_begun"]

    def _turn(self) -> Iterator[Any]:
        return iterate(self._dataloader)
