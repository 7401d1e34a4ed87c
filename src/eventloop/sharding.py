"""Which rank sees which samples: a data loader of all of them becomes one of a rank's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from eventloop.data import is_map_style
from eventloop.errors import TaskError, counted
from eventloop.seeding import kept_generators, seed_everything

if TYPE_CHECKING:
    from eventloop.state import State


def sharded_for_training(dataloader: Any, state: State) -> Any:
    """Gives a data loader of this rank's part of the samples.

    A map-style `DataLoader` gets a `DistributedSampler`, of a list of batches each rank takes
    every `world_size`-th; a sampler that knows of ranks stays, and so does any other iterable,
    which has to split itself by `state.rank`.

    Raises:
        TaskError: there are fewer samples than ranks.
    """
    num, uneven = state.world_size, state.settings.uneven
    if _is_list(dataloader):
        _require(len(dataloader), num, "batch", "batches")
        return dataloader[state.rank :: num]
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return dataloader
    if not _has_plain_batches(dataloader):
        return _rebuilt(dataloader, batch_sampler=_Part(dataloader.batch_sampler, state))
    _require(len(dataloader.sampler), num, "sample")
    if uneven == "error" and len(dataloader.sampler) % num:
        raise TaskError(
            f"{counted(len(dataloader.sampler), 'sample')} can't be split evenly over {num} ranks",
            fix="set uneven to pad (some are seen twice an epoch) or to drop (some are left out)",
        )
    if type(dataloader.sampler) in (RandomSampler, SequentialSampler):
        sampler: Any = DistributedSampler(
            dataloader.dataset,
            num,
            state.rank,
            shuffle=type(dataloader.sampler) is RandomSampler,
            seed=state.settings.seed,
            drop_last=uneven == "drop",
        )
    else:
        sampler = _Part(dataloader.sampler, state, even=uneven)
    return _with_sampler(dataloader, sampler)


def sharded_for_evaluation(dataloader: Any, state: State) -> Any:
    """Gives a data loader of this rank's part, so that all ranks together see each sample once.

    A set of fewer samples than ranks, and an iterable that can't be split, stay whole.
    """
    if is_too_small(dataloader, state):
        return dataloader
    if _is_list(dataloader):
        return dataloader[state.rank :: state.world_size]
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return dataloader
    if not _has_plain_batches(dataloader):
        return _rebuilt(dataloader, batch_sampler=_Part(dataloader.batch_sampler, state))
    return _with_sampler(dataloader, _Part(dataloader.sampler, state))


def splits_itself(dataloader: Any) -> bool:
    """Tells whether nobody but the data itself can split it, of which nobody knows whether it does."""
    return not _is_list(dataloader) and not is_map_style(dataloader)


def is_too_small(dataloader: Any, state: State) -> bool:
    """Tells whether there is less to evaluate than there are ranks, so that each sees all of it."""
    if _is_list(dataloader):
        return len(dataloader) < state.world_size
    if not is_map_style(dataloader) or _knows_ranks(dataloader):
        return False
    plain = _has_plain_batches(dataloader)
    return len(dataloader.sampler if plain else dataloader.batch_sampler) < state.world_size


class _Part(Sampler[Any]):
    """Every `world_size`-th of what a sampler gives, from `rank` on; the ranks draw alike.

    Args:
        even: "pad" repeats the first ones and "drop" leaves the last ones out, so that all ranks
            have as many; "" gives each what there is.
    """

    def __init__(self, sampler: Any, state: State, even: str = "") -> None:
        self._sampler = sampler
        self._rank, self._num = state.rank, state.world_size
        self._seed = state.settings.seed
        self._even = even
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Has the next draw depend on the epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Gives how many are this rank's."""
        total = len(self._sampler)
        if self._even == "drop":
            return total // self._num
        rank = 0 if self._even == "pad" else self._rank
        return len(range(rank, total, self._num))

    def __iter__(self) -> Iterator[Any]:
        """Draws all and gives this rank's."""
        with kept_generators():
            # What draws from the global generators draws the same on every rank.
            seed_everything((self._seed + self._epoch) % 2**32)
            drawn = list(self._sampler)
        missing = -len(drawn) % self._num
        if self._even == "drop" and missing:
            drawn = drawn[: missing - self._num]
        elif self._even == "pad":
            drawn += drawn[:missing]
        return iter(drawn[self._rank :: self._num])


def _is_list(dataloader: Any) -> bool:
    return isinstance(dataloader, Sequence) and not isinstance(dataloader, str)


def _knows_ranks(dataloader: Any) -> bool:
    """Tells whether a sampler splits by rank already: torch's, or one with its attribute."""
    samplers = (dataloader.sampler, dataloader.batch_sampler)
    return any(getattr(sampler, "num_replicas", None) is not None for sampler in samplers)


def _has_plain_batches(dataloader: Any) -> bool:
    """Tells whether batches are made of the sampler's samples, not by a batch sampler of its own."""
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
