"""Which rank sees which samples: a data loader of all of them becomes one of a rank's own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from eventloop.data.combine import Cycled, NoData, Zipped, innermost, is_map_style, seed_of_part
from eventloop.data.sample_seeds import may_repeat, numbered
from eventloop.errors import TaskError, counted
from eventloop.rng import kept_generators, seed_everything

# Kinds of shared order that a run keeps, whatever the number of ranks with which it goes on.
LASTING = ("distributed", "seeded")

if TYPE_CHECKING:
    from eventloop.state import State


def sharded_for_training(dataloader: Any, state: State, seed: int | None = None) -> Any:
    """Returns a data loader of this rank's part of the samples; of several, of each.

    A map-style `DataLoader` gets a `DistributedSampler`, of a list of batches each rank takes
    every `world_size`-th; a sampler that knows of ranks stays, and so does any other iterable,
    which has to split itself by `state.rank`.

    Args:
        seed: what all ranks draw an order from; the run's unless given.

    Raises:
        TaskError: there are fewer samples than ranks.
    """
    num, uneven = state.world_size, state.settings.uneven
    seed = state.settings.seed if seed is None else seed
    if isinstance(dataloader, Cycled):
        return Cycled(sharded_for_training(dataloader.dataloader, state, seed))
    if isinstance(dataloader, Zipped):
        return dataloader.with_parts(
            lambda idx, one: sharded_for_training(one, state, seed_of_part(seed, idx))
        )
    if isinstance(dataloader, tuple) and not dataloader:  # of a task that is only evaluated
        return dataloader
    if _is_list(dataloader):
        _require(len(dataloader), num, "batch", "batches")
        return dataloader[state.rank :: num]
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return dataloader
    if not _has_plain_batches(dataloader):
        return _rebuilt(
            dataloader, batch_sampler=RankPart(dataloader.batch_sampler, state.rank, num, seed)
        )
    _require(len(dataloader.sampler), num, "sample")
    if uneven == "error" and len(dataloader.sampler) % num:
        raise TaskError(
            f"{counted(len(dataloader.sampler), 'sample')} can't be split evenly over {num} ranks",
            fix="set uneven to pad (some are seen twice an epoch) or to drop (some are left out)",
        )
    if _is_torchs(dataloader.sampler):
        sampler: Any = DistributedSampler(
            dataloader.dataset,
            num,
            state.rank,
            shuffle=type(dataloader.sampler) is RandomSampler,
            seed=seed,
            drop_last=uneven == "drop",
        )
    else:
        sampler = RankPart(dataloader.sampler, state.rank, num, seed, even=uneven)
    return _with_sampler(dataloader, sampler)


def sharded_for_evaluation(dataloader: Any, state: State) -> Any:
    """Returns a data loader of this rank's part, so that all ranks together see each sample once.

    A set of fewer samples than ranks, and an iterable that can't be split, stay whole.
    """
    if is_too_small(dataloader, state):
        return dataloader
    if isinstance(dataloader, Cycled):
        return Cycled(sharded_for_evaluation(dataloader.dataloader, state))
    if isinstance(dataloader, Zipped):
        return dataloader.with_parts(lambda idx, one: sharded_for_evaluation(one, state))
    if _is_list(dataloader):
        return dataloader[state.rank :: state.world_size]
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return dataloader
    if not _has_plain_batches(dataloader):
        return _rebuilt(
            dataloader, batch_sampler=RankPart(dataloader.batch_sampler, *_ranks(state))
        )
    return _with_sampler(dataloader, RankPart(dataloader.sampler, *_ranks(state)))


def is_split_here(dataloader: Any) -> bool:
    """Whether the samples are shared out here, so that all ranks must have the same ones."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return False  # of its parts that is asked
    return _is_list(dataloader) or (is_map_style(dataloader) and not _knows_ranks(dataloader))


def splits_itself(dataloader: Any) -> bool:
    """Returns whether only the data itself can split it over ranks; whether it does isn't known."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return any(map(splits_itself, innermost(dataloader)))
    known = _is_list(dataloader) or is_map_style(dataloader)
    return not known and not isinstance(dataloader, NoData)


def is_too_small(dataloader: Any, state: State) -> bool:
    """Returns whether there is less to evaluate than there are ranks, so that each sees all of it."""
    if isinstance(dataloader, (Cycled, Zipped)):
        return any(is_too_small(one, state) for one in innermost(dataloader))
    if _is_list(dataloader):
        return len(dataloader) < state.world_size
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return False
    plain = _has_plain_batches(dataloader)
    return len(dataloader.sampler if plain else dataloader.batch_sampler) < state.world_size


class RankPart(Sampler[Any]):
    """Every `num_replicas`-th of what a sampler gives, from `rank` on; the ranks draw alike.

    Args:
        sampler: gives all.
        rank, num_replicas: this one, of how many.
        seed: what all ranks draw from, with the epoch; None where the sampler sees to that.
        even: "pad" repeats the first ones and "drop" leaves the last ones out, so that all ranks
            have as many; "" gives each what there is.
        begun_with: for how many ranks that was done first, where the run had others.
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
        """Has the next draw depend on the epoch."""
        self._epoch = epoch
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Returns how many are this rank's."""
        total = len(self.sampler)
        for divisor in self._divisors:
            if self.even:
                total += _excess(total, divisor, self.even)
        return len(range(self.rank, total, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        """Draws all and gives this rank's."""
        if self.seed is None:
            drawn = self._drawn()
        else:
            with kept_generators():
                # What draws from the global generators draws the same on every rank.
                seed_everything((self.seed + self._epoch) % 2**32)
                drawn = self._drawn()
        for divisor in self._divisors:
            if self.even:
                excess = _excess(len(drawn), divisor, self.even)
                more = itertools.islice(itertools.cycle(drawn), max(excess, 0))
                drawn = drawn[: excess if excess < 0 else None] + list(more)
        return iter(drawn[self.rank :: self.num_replicas])

    def _drawn(self) -> list[Any]:
        # What comes again is told apart here, where all ranks' samples are seen.
        return list(numbered(self.sampler) if may_repeat(self.sampler) else self.sampler)


def _excess(number: int, divisor: int, even: str) -> int:
    """Returns how many are added, or with a minus left out, to be a multiple of `divisor`."""
    return -(number % divisor) if even == "drop" else -number % divisor


def shared_order(dataloader: Any) -> dict[str, Any]:
    """Says how all ranks together come to the order of a map-style data loader.

    Returns:
        Plain values: its kind, how many ranks share it, and what else it depends on.
    """
    sampler = dataloader.sampler
    if not _has_plain_batches(dataloader) or dataloader.batch_sampler is None:
        source = sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
        return {"kind": "its own batches", "ranks": getattr(source, "num_replicas", 1)}
    if type(sampler) is DistributedSampler:
        return {
            "kind": "distributed",
            "ranks": sampler.num_replicas,
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "even": "drop" if sampler.drop_last else "pad",
        }
    if type(sampler) is RankPart:
        ranks, seed, even = sampler.num_replicas, sampler.seed, sampler.even
        return {"kind": "seeded", "ranks": ranks, "seed": seed, "even": even}
    kind = "its own ranks" if _knows_ranks(dataloader) else "drawn"
    return {"kind": kind, "ranks": getattr(sampler, "num_replicas", 1)}


def order_as(order: Mapping[str, Any], dataloader: Any, rank: int, world_size: int) -> RankPart:
    """Returns a sampler of this rank's part of an order that other ranks, or as many, had.

    Args:
        order: what `shared_order` said of the data loader with those ranks.
        dataloader: with these ranks; it makes batches of its sampler's samples.

    Raises:
        TaskError: the order depends on who takes part.
    """
    kind, even = order["kind"], order.get("even", "pad")
    mine = dataloader.sampler
    if kind == "distributed":
        whole: Any = DistributedSampler(
            dataloader.dataset, 1, 0, shuffle=order["shuffle"], seed=order["seed"]
        )
    elif kind in ("seeded", "drawn") and type(mine) is DistributedSampler:
        # Made of one of torch's; see `sharded_for_training`.
        shuffled = RandomSampler(dataloader.dataset, generator=dataloader.generator)
        whole = shuffled if mine.shuffle else SequentialSampler(dataloader.dataset)
        even = "drop" if mine.drop_last else "pad"
    elif kind in ("seeded", "drawn") and not _knows_ranks(dataloader):
        whole = mine
    elif kind in ("seeded", "drawn") and type(mine) is RankPart:
        whole, even = mine.sampler, mine.even
    else:
        raise TaskError(
            f"the train data loader has {kind}, made for {order['ranks']} ranks, of which "
            f"{world_size} can't take the same samples a step",
            fix=f"go on with {order['ranks']} ranks, or from a checkpoint at the end of an epoch",
        )
    if kind == "drawn" and dataloader.drop_last:
        even = "drop"  # what one process left out
    seed = order["seed"] if kind == "seeded" else None
    return RankPart(whole, rank, world_size, seed, even, order["ranks"])


def _is_torchs(sampler: Any) -> bool:
    """Returns whether a sampler yields each sample once, as a `DistributedSampler` does."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _ranks(state: State) -> tuple[int, int, int]:
    return state.rank, state.world_size, state.settings.seed


def _is_list(dataloader: Any) -> bool:
    return isinstance(dataloader, Sequence) and not isinstance(dataloader, str)


def _knows_ranks(dataloader: Any) -> bool:
    """Returns whether a sampler splits by rank already: torch's, or one with its attribute."""
    samplers = (dataloader.sampler, dataloader.batch_sampler)
    return any(getattr(sampler, "num_replicas", None) is not None for sampler in samplers)


def _has_plain_batches(dataloader: Any) -> bool:
    """Returns whether batches are made of the sampler's samples, not by a batch sampler of its own."""
    return dataloader.batch_size is not None or dataloader.batch_sampler is None


def _with_sampler(dataloader: Any, sampler: Sampler[Any]) -> Any:
    if dataloader.batch_sampler is None:
        return _rebuilt(dataloader, batch_size=None, sampler=sampler)
    return _rebuilt(
        dataloader,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        sampler=sampler,
    )


def _rebuilt(dataloader: Any, **given: Any) -> Any:
    """Makes a data loader like another, from its public attributes.

    Raises:
        TaskError: its class can't be made of them.
    """
    kept = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
            "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
            "in_order")  # fmt: skip
    try:
        return type(dataloader)(
            dataloader.dataset, **{name: getattr(dataloader, name) for name in kept}, **given
        )
    except TypeError as error:
        raise TaskError(
            f"a {type(dataloader).__name__} can't be split over ranks: {error}",
            fix="give it a sampler=torch.utils.data.DistributedSampler(dataset)",
        ) from error


def _require(number: int, world_size: int, singular: str, plural: str = "") -> None:
    if number < world_size:
        has = counted(number, singular, plural)
        most = counted(max(number, 1), "process", "processes")
        raise TaskError(
            f"the train data loader has {has}, fewer than the {world_size} ranks",
            fix=f"train in {most} at most, or give it more data",
        )
