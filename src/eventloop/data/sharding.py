"""Samplers that share the samples of a map-style data loader among any number of ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from eventloop.data.sample_seeds import mark_repeats, may_repeat
from eventloop.errors import TaskError
from eventloop.rng import kept_generators, seed_everything

if TYPE_CHECKING:
    from eventloop.data.loaders import MapStyleLoader

# Kinds of shared order that a resumed run keeps with any number of ranks.
SHARED = ("distributed", "seeded")


def rank_samples(
    dataloader: Any, rank: int, num_ranks: int, seed: int | None, uneven: str = ""
) -> Any:
    """Returns a data loader over a map-style data set with this rank's samples.

    Args:
        dataloader: makes batches of its sampler's samples.
        rank, num_ranks: this rank, and the number of ranks.
        seed: the seed from which all ranks draw the order.
        uneven: "pad" and "error" repeat samples and "drop" leaves some out, so that all ranks have the
            same number; "" does neither, so that all ranks together have each sample once.
    """
    sampler: Any = dataloader.sampler
    if uneven and _is_torchs(sampler, dataloader.dataset):
        sampler = DistributedSampler(
            dataloader.dataset,
            num_ranks,
            rank,
            shuffle=type(sampler) is RandomSampler,
            seed=seed or 0,
            drop_last=uneven == "drop",
        )
    else:
        sampler = RankPart(sampler, rank, num_ranks, seed, even=uneven)
    batches = dataloader.batch_sampler
    if batches is not None:  # created by the loader itself, of torch's or torchdata's class
        batches = type(batches)(sampler, dataloader.batch_size, dataloader.drop_last)
    return copy_with(dataloader, sampler=sampler, batch_sampler=batches)


def rank_batches(dataloader: Any, rank: int, num_ranks: int, seed: int | None) -> Any:
    """Returns a data loader with this rank's share of the batches of the user's batch sampler."""
    sampler_of_rank = RankPart(dataloader.batch_sampler, rank, num_ranks, seed)
    return copy_with(dataloader, batch_sampler=sampler_of_rank)


class RankPart(Sampler[Any]):
    """A rank's shard of a sampler: every `num_replicas`-th entry, from `rank` on.

    All ranks draw the same order.

    Args:
        sampler: yields the entries of all ranks.
        rank, num_replicas: this rank, and the number of ranks.
        seed: with the epoch, the seed from which all ranks draw; None if the sampler has its own.
        even: "pad" repeats the first entries and "drop" leaves the last entries out, so that all ranks
            have the same number; "" does neither.
        begun_with: the number of ranks that the run was begun with, for which entries are padded or
            dropped first.
    """

    def __init__(
        self,
        sampler: Any,
        rank: int,
        num_replicas: int,
        seed: int | None,
        even: str = "",
        begun_with: int = 1,
    ) -> None:
        self.sampler = sampler
        self.rank = rank
        self.num_replicas = num_replicas
        self.seed = seed
        self.even = even
        self._divisors = (begun_with, num_replicas)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that the next order depends on."""
        self._epoch = epoch
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns the number of entries of this rank."""
        total = len(self.sampler)
        for divisor in self._divisors:
            if self.even:
                total += _excess(total, divisor, self.even)
        return len(range(self.rank, total, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """Draws the entries of all ranks and returns an iterator over this rank's."""
        if self.seed is None:
            entries = self._drawn()
        else:
            with kept_generators():
                # A sampler without its own generator draws from the global ones, which may differ
                # between ranks.
                seed_everything((self.seed + self._epoch) % 2**32)
                entries = self._drawn()
        for divisor in self._divisors:
            if self.even:
                excess = _excess(len(entries), divisor, self.even)
                repeated = itertools.islice(itertools.cycle(entries), max(excess, 0))
                entries = entries[: excess if excess < 0 else None] + list(repeated)
        return iter(entries[self.rank :: self.num_replicas])

    def _drawn(self) -> list[Any]:
        # Repeats are marked before the entries are divided: a repeated index may go to another rank.
        return list(mark_repeats(self.sampler) if may_repeat(self.sampler) else self.sampler)


def _excess(number: int, divisor: int, even: str) -> int:
    """Returns the number to add to get a multiple of `divisor`; negative if entries are dropped."""
    return -(number % divisor) if even == "drop" else -number % divisor


class UnevenSteps(Sampler[list[Any]]):
    """A rank's batches, if the samples of a step needn't divide evenly: some ranks get one more.

    Args:
        sampler: yields the samples of all ranks, in the same order on each rank.
        rank, world_size: this rank, and the number of ranks.
        step_size: the number of samples in a step over all ranks, at least `world_size`.
        drop_last: whether to leave out a last, smaller step. If it has fewer samples than there are
            ranks, it is also left out if the sampler's `even` is "drop"; otherwise samples are repeated.
    """

    def __init__(
        self, sampler: RankPart, rank: int, world_size: int, step_size: int, drop_last: bool
    ) -> None:
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._step_size = step_size
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Returns the number of steps, the same on every rank."""
        num_whole, remainder = divmod(len(self.sampler), self._step_size)
        return num_whole + self._takes(remainder)

    def __iter__(self) -> Iterator[list[Any]]:
        """Draws the samples of all ranks and yields this rank's share of each step."""
        samples = iter(self.sampler)
        while step := list(itertools.islice(samples, self._step_size)):
            if len(step) < self._step_size and not self._takes(len(step)):
                return
            size = max(len(step), self._world_size)
            step = list(itertools.islice(itertools.cycle(step), size))
            yield step[self._rank :: self._world_size]

    def _takes(self, num_remaining: int) -> bool:
        """Returns whether a last step with this number of samples is made."""
        is_too_small = num_remaining < self._world_size and self.sampler.even == "drop"
        return num_remaining > 0 and not self._drop_last and not is_too_small


def shared_order(loader: MapStyleLoader) -> dict[str, Any]:
    """Returns the values that determine a loader's order: its kind, the number of ranks, a seed."""
    sampler = loader.dataloader.sampler
    ranks = loader.num_replicas
    if not loader.has_plain_batches or loader.dataloader.batch_sampler is None:
        return {"kind": "its own batches", "ranks": ranks or 1}
    if type(sampler) is DistributedSampler:
        return {
            "kind": "distributed",
            "ranks": ranks,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "even": "drop" if sampler.drop_last else "pad",
        }
    if type(sampler) is RankPart:
        return {"kind": "seeded", "ranks": ranks, "seed": sampler.seed, "even": sampler.even}
    return {"kind": "its own ranks" if ranks else "drawn", "ranks": ranks or 1}


def order_as(
    order: Mapping[str, Any], loader: MapStyleLoader, rank: int, world_size: int
) -> RankPart:
    """Returns a sampler of this rank's shard of a saved order.

    Args:
        order: the result of `shared_order`, possibly with another number of ranks.
        loader: the loader of the current ranks; it makes batches of its sampler's samples.
        rank, world_size: this rank, and the number of ranks.

    Raises:
        TaskError: the order depends on the number of ranks.
    """
    kind = order["kind"]
    even = order.get("even", "pad")
    dataset = loader.dataloader.dataset
    sampler = loader.dataloader.sampler
    if kind == "distributed":
        shuffle = order["shuffle"]
        sampler_of_all: Any = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=order["seed"])
    elif kind in ("seeded", "drawn") and type(sampler) is DistributedSampler:
        # `rank_samples` has replaced torch's sampler by this one; recreate it.
        shuffled = RandomSampler(dataset, generator=loader.dataloader.generator)
        sampler_of_all = shuffled if sampler.shuffle else SequentialSampler(dataset)
        even = "drop" if sampler.drop_last else "pad"
    elif kind in ("seeded", "drawn") and not loader.num_replicas:
        sampler_of_all = sampler
    elif kind in ("seeded", "drawn") and type(sampler) is RankPart:
        sampler_of_all = sampler.sampler
        even = sampler.even
    else:
        raise TaskError(
            f"the train data loader has {kind}, made for {order['ranks']} ranks; with {world_size} "
            "ranks, a step can't have the same samples",
            fix=f"resume with {order['ranks']} ranks, or from a checkpoint at the end of an epoch",
        )
    if kind == "drawn" and loader.dataloader.drop_last:
        even = "drop"  # as the single process did
    seed = order["seed"] if kind == "seeded" else None
    return RankPart(sampler_of_all, rank, world_size, seed, even, order["ranks"])


def copy_with(dataloader: Any, **replacements: Any) -> Any:
    """Returns a copy of a data loader with some attributes replaced.

    torch forbids setting these attributes, because its batch sampler would keep the old sampler; the
    callers replace that, too. `_iterator` (checked with torch 2.13) is reset because it holds
    persistent workers, which have the old attributes.
    """
    copied = copy.copy(dataloader)
    for name, value in {**replacements, "_iterator": None}.items():
        object.__setattr__(copied, name, value)
    return copied


def _is_torchs(sampler: Any, dataset: Any) -> bool:
    """Returns whether a sampler is torch's and yields each sample once, like `DistributedSampler`."""
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    return len(sampler) == len(dataset) and not getattr(sampler, "replacement", False)
