"""Shards data loaders over ranks: which rank sees which samples."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from eventloop.data.combined import Cycled, NoData, Zipped, innermost, is_map_style, known_length
from eventloop.data.sample_seeds import mark_repeats, may_repeat, seed_of_part
from eventloop.data.sampler_state import samplers_of
from eventloop.errors import TaskError, counted
from eventloop.rng import kept_generators, seed_everything

# Kinds of shared order that a run keeps with any number of ranks.
SHARED = ("distributed", "seeded")

if TYPE_CHECKING:
    from eventloop.state import State


def sharded_for_training(dataloader: Any, state: State, seed: int | None = None) -> Any:
    """Returns a data loader of this rank's shard; of several data loaders, of each.

    A map-style `DataLoader` gets a `DistributedSampler`; of a list of batches each rank takes every
    `world_size`-th. A sampler with `num_replicas` stays, and so does any other iterable, which has
    to shard itself by `state.data_rank`.

    Args:
        seed: what all ranks draw an order from; the run's unless given.

    Raises:
        TaskError: there are fewer samples than ranks, or a sampler has no length.
    """
    num, uneven = state.data_world_size, state.settings.uneven
    seed = state.settings.seed if seed is None else seed
    if isinstance(dataloader, (Cycled, Zipped)):
        return dataloader.with_parts(
            lambda idx, one: sharded_for_training(one, state, seed_of_part(seed, idx))
        )
    if isinstance(dataloader, tuple) and not dataloader:  # of a task that is only evaluated
        return dataloader
    if _is_list(dataloader):
        _require(len(dataloader), num, "batch", "batches")
        return dataloader[state.data_rank :: num]
    if not is_map_style(dataloader) or _num_replicas(dataloader):
        return dataloader
    if not _has_plain_batches(dataloader):
        if (length := known_length(dataloader)) is not None:
            _require(length, num, "batch", "batches")
        part = RankPart(dataloader.batch_sampler, state.data_rank, num, seed)
        return copy_with(dataloader, batch_sampler=part)
    length = _length(dataloader.sampler)
    _require(length, num, "sample")
    if uneven == "error" and length % num:
        raise TaskError(
            f"{counted(length, 'sample')} can't be split evenly over {num} ranks",
            fix="set uneven to pad (some are seen twice an epoch) or to drop (some are left out)",
        )
    if _is_torchs(dataloader.sampler, dataloader.dataset):
        shuffle, ranks = type(dataloader.sampler) is RandomSampler, (num, state.data_rank)
        sampler: Any = DistributedSampler(
            dataloader.dataset, *ranks, shuffle=shuffle, seed=seed, drop_last=uneven == "drop"
        )
    else:
        sampler = RankPart(dataloader.sampler, state.data_rank, num, seed, even=uneven)
    return _with_sampler(dataloader, sampler)


def sharded_for_evaluation(dataloader: Any, state: State) -> Any:
    """Returns a data loader of this rank's shard, so that all ranks together see each sample once.

    A set of fewer samples than ranks, and an iterable that can't be sharded, stay whole.
    """
    if is_too_small(dataloader, state):
        return dataloader
    if isinstance(dataloader, (Cycled, Zipped)):
        return dataloader.with_parts(lambda idx, one: sharded_for_evaluation(one, state))
    if _is_list(dataloader):
        return dataloader[state.data_rank :: state.data_world_size]
    if not is_map_style(dataloader) or _num_replicas(dataloader):
        return dataloader
    ranks = state.data_rank, state.data_world_size, state.settings.seed
    if not _has_plain_batches(dataloader):
        return copy_with(dataloader, batch_sampler=RankPart(dataloader.batch_sampler, *ranks))
    return _with_sampler(dataloader, RankPart(dataloader.sampler, *ranks))


def is_split_here(dataloader: Any) -> bool:
    """Whether this module shards it, so that all ranks must have the same samples; not of combined ones."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return False
    return _is_list(dataloader) or (is_map_style(dataloader) and not _num_replicas(dataloader))


def splits_itself(dataloader: Any) -> bool:
    """Returns whether only the iterable itself can shard; whether it does isn't known."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return any(map(splits_itself, innermost(dataloader)))
    known = _is_list(dataloader) or is_map_style(dataloader)
    return not known and not isinstance(dataloader, NoData)


def is_too_small(dataloader: Any, state: State) -> bool:
    """Returns whether there are fewer samples than ranks, so that each rank evaluates all of them."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return any(is_too_small(one, state) for one in innermost(dataloader))
    if _is_list(dataloader):
        return len(dataloader) < state.data_world_size
    if not is_map_style(dataloader) or _num_replicas(dataloader):
        return False
    plain = _has_plain_batches(dataloader)
    sampler = dataloader.sampler if plain else dataloader.batch_sampler
    return _length(sampler) < state.data_world_size


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


def shared_order(dataloader: Any) -> dict[str, Any]:
    """Returns what the order of a map-style data loader depends on: its kind, number of ranks, seed ..."""
    sampler, ranks = dataloader.sampler, _num_replicas(dataloader)
    if not _has_plain_batches(dataloader) or dataloader.batch_sampler is None:
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


def order_as(order: Mapping[str, Any], dataloader: Any, rank: int, world_size: int) -> RankPart:
    """Returns a sampler of this rank's shard of a saved order.

    Args:
        order: what `shared_order` returned, maybe with another number of ranks.
        dataloader: with these ranks; it makes batches of its sampler's samples.

    Raises:
        TaskError: the order depends on the number of ranks.
    """
    kind, even = order["kind"], order.get("even", "pad")
    mine = dataloader.sampler
    if kind == "distributed":
        shuffle, seed = order["shuffle"], order["seed"]
        whole: Any = DistributedSampler(dataloader.dataset, 1, 0, shuffle=shuffle, seed=seed)
    elif kind in ("seeded", "drawn") and type(mine) is DistributedSampler:
        # Made of one of torch's; see `sharded_for_training`.
        shuffled = RandomSampler(dataloader.dataset, generator=dataloader.generator)
        whole = shuffled if mine.shuffle else SequentialSampler(dataloader.dataset)
        even = "drop" if mine.drop_last else "pad"
    elif kind in ("seeded", "drawn") and not _num_replicas(dataloader):
        whole = mine
    elif kind in ("seeded", "drawn") and type(mine) is RankPart:
        whole, even = mine.sampler, mine.even
    else:
        raise TaskError(
            f"the train data loader has {kind}, made for {order['ranks']} ranks, of which "
            f"{world_size} can't take the same samples a step",
            fix=f"resume with {order['ranks']} ranks, or from a checkpoint at the end of an epoch",
        )
    if kind == "drawn" and dataloader.drop_last:
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


def _is_list(dataloader: Any) -> bool:
    return isinstance(dataloader, Sequence) and not isinstance(dataloader, str)


def _num_replicas(dataloader: Any) -> int:
    """Returns how many ranks a sampler shards for: torch's, or one with `num_replicas`; 0 if none does."""
    samplers = (*samplers_of(dataloader.sampler), *samplers_of(dataloader.batch_sampler))
    return next((num for one in samplers if (num := getattr(one, "num_replicas", None))), 0)


def _has_plain_batches(dataloader: Any) -> bool:
    """Returns whether batches are made of its sampler's samples, not by a batch sampler of the user's."""
    return dataloader.batch_size is not None or dataloader.batch_sampler is None


def _with_sampler(dataloader: Any, sampler: Sampler[Any]) -> Any:
    batches = dataloader.batch_sampler
    if batches is not None:  # of the class that the loader makes itself, torch's or torchdata's
        batches = type(batches)(sampler, dataloader.batch_size, dataloader.drop_last)
    return copy_with(dataloader, sampler=sampler, batch_sampler=batches)


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise TaskError(
            f"a {type(sampler).__name__} without a length can't be split over ranks",
            fix="give it `__len__`; or `num_replicas`, if it yields what is this rank's alone",
        ) from error


def _require(number: int, world_size: int, singular: str, plural: str = "") -> None:
    if number < world_size:
        has = counted(number, singular, plural)
        most = counted(max(number, 1), "process", "processes")
        raise TaskError(
            f"the train data loader has {has}, fewer than the {world_size} ranks",
            fix=f"train in {most} at most, or give it more data",
        )
