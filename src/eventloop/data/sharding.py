"""Samplers by which ranks share the samples of a map-style data loader, however many ranks there are."""

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

# Kinds of shared order that a run keeps with any number of ranks.
SHARED = ("distributed", "seeded")


def rank_samples(
    dataloader: Any, rank: int, num_ranks: int, seed: int | None, uneven: str = ""
) -> Any:
    """Returns a data loader over a map-style data set with this rank's samples.

    Args:
        dataloader: makes batches of its sampler's samples.
        rank, num_ranks: this rank, of how many.
        seed: what all ranks draw an order from.
        uneven: "pad" and "error" repeat samples and "drop" leaves some out, so that all ranks have as
            many; "" does neither, so that all ranks together have each sample once.
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
    if batches is not None:  # of the class that the loader makes itself, torch's or torchdata's
        batches = type(batches)(sampler, dataloader.batch_size, dataloader.drop_last)
    return copy_with(dataloader, sampler=sampler, batch_sampler=batches)


def rank_batches(dataloader: Any, rank: int, num_ranks: int, seed: int | None) -> Any:
    """Returns a data loader with this rank's batches of a batch sampler of the user's."""
    part = RankPart(dataloader.batch_sampler, rank, num_ranks, seed)
    return copy_with(dataloader, batch_sampler=part)


class RankPart(Sampler[Any]):
    """A rank's shard of a sampler: every `num_replicas`-th entry, from `rank` on. All ranks draw alike.

    Args:
        sampler: yields the entries of all ranks.
        rank, num_replicas: this rank, of how many.
        seed: what all ranks draw from, with the epoch; None if the sampler has its own.
        even: "pad" repeats the first entries and "drop" leaves the last out, so that all ranks have
            as many; "" does neither.
        begun_with: the number of ranks that this was done for first, in a run begun with others.
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
        """Returns how many entries are this rank's."""
        total = len(self.sampler)
        for divisor in self._divisors:
            if self.even:
                total += _excess(total, divisor, self.even)
        return len(range(self.rank, total, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """Draws the entries of all ranks and returns an iterator over this rank's."""
        if self.seed is None:
            drawn = self._drawn()
        else:
            with kept_generators():
                # So that a sampler without a generator of its own draws alike on all ranks.
                seed_everything((self.seed + self._epoch) % 2**32)
                drawn = self._drawn()
        for divisor in self._divisors:
            if self.even:
                excess = _excess(len(drawn), divisor, self.even)
                more = itertools.islice(itertools.cycle(drawn), max(excess, 0))
                drawn = drawn[: excess if excess < 0 else None] + list(more)
        return iter(drawn[self.rank :: self.num_replicas])

    def _drawn(self) -> list[Any]:
        # Repeats are marked here, where the samples of all ranks are seen.
        return list(mark_repeats(self.sampler) if may_repeat(self.sampler) else self.sampler)


def _excess(number: int, divisor: int, even: str) -> int:
    """Returns how many to add, or if negative leave out, to get a multiple of `divisor`."""
    return -(number % divisor) if even == "drop" else -number % divisor


class UnevenSteps(Sampler[list[Any]]):
    """A rank's batches of steps whose size the number of ranks needn't divide: some take one more.

    Args:
        sampler: yields the samples of all ranks, which draw them alike.
        rank, world_size: this one, of how many.
        step_size: how many samples all ranks take a step; at least one each.
        drop_last: whether a last step of fewer samples is left out. It is, too, if it has fewer
            than there are ranks and the sampler drops what doesn't divide; else it repeats some.
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
        """Returns how many steps there are, on every rank alike."""
        num_whole, rest = divmod(len(self.sampler), self._step_size)
        return num_whole + self._takes(rest)

    def __iter__(self) -> Iterator[list[Any]]:
        """Draws the samples of all and yields this rank's part of each step."""
        samples = iter(self.sampler)
        while step := list(itertools.islice(samples, self._step_size)):
            if len(step) < self._step_size and not self._takes(len(step)):
                return
            size = max(len(step), self._world_size)
            step = list(itertools.islice(itertools.cycle(step), size))
            yield step[self._rank :: self._world_size]

    def _takes(self, rest: int) -> bool:
        """Returns whether a last step of so few samples is made."""
        is_too_small = rest < self._world_size and self.sampler.even == "drop"
        return rest > 0 and not self._drop_last and not is_too_small


def shared_order(loader: MapStyleLoader) -> dict[str, Any]:
    """Returns what the order of a data loader depends on: its kind, the number of ranks, a seed."""
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
        order: what `shared_order` returned, maybe with another number of ranks.
        loader: with these ranks; it makes batches of its sampler's samples.
        rank, world_size: this rank, of how many.

    Raises:
        TaskError: the order depends on the number of ranks.
    """
    kind = order["kind"]
    even = order.get("even", "pad")
    dataset = loader.dataloader.dataset
    sampler = loader.dataloader.sampler
    if kind == "distributed":
        shuffle = order["shuffle"]
        whole: Any = DistributedSampler(dataset, 1, 0, shuffle=shuffle, seed=order["seed"])
    elif kind in ("seeded", "drawn") and type(sampler) is DistributedSampler:
        # `rank_samples` has put it in place of one of torch's.
        shuffled = RandomSampler(dataset, generator=loader.dataloader.generator)
        whole = shuffled if sampler.shuffle else SequentialSampler(dataset)
        even = "drop" if sampler.drop_last else "pad"
    elif kind in ("seeded", "drawn") and not loader.num_replicas:
        whole = sampler
    elif kind in ("seeded", "drawn") and type(sampler) is RankPart:
        whole = sampler.sampler
        even = sampler.even
    else:
        raise TaskError(
            f"the train data loader has {kind}, made for {order['ranks']} ranks, of which "
            f"{world_size} can't take the same samples a step",
            fix=f"resume with {order['ranks']} ranks, or from a checkpoint at the end of an epoch",
        )
    if kind == "drawn" and loader.dataloader.drop_last:
        even = "drop"  # what one process left out
    seed = order["seed"] if kind == "seeded" else None
    return RankPart(whole, rank, world_size, seed, even, order["ranks"])


def copy_with(dataloader: Any, **parts: Any) -> Any:
    """Returns a copy of a data loader with other parts.

    torch forbids to set the parts of a loader, because its batch sampler would keep the old ones;
    here that is replaced, too. `_iterator` (checked with torch 2.13) holds persistent workers, which
    have the old parts.
    """
    copied = copy.copy(dataloader)
    for name, value in {**parts, "_iterator": None}.items():
        object.__setattr__(copied, name, value)
    return copied


def _is_torchs(sampler: Any, dataset: Any) -> bool:
    """Returns whether it yields each sample of a data set once, as a `DistributedSampler` does."""
    if type(sampler) not in (RandomSampler, SequentialSampler):
        return False
    return len(sampler) == len(dataset) and not getattr(sampler, "replacement", False)
