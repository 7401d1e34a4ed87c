"""Base classes of the streams: sequences of samples whose position can be saved."""

from __future__ import annotations

import copy
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

_MASK = (1 << 64) - 1


@runtime_checkable
class Stateful(Protocol):
    """An object whose position can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""

    def load_state_dict(self, state: Any) -> None:
        """Restores a position from `state_dict`."""


class Stream(IterableDataset[Any], ABC):
    """A sequence of samples. Iterating over it again begins the next epoch.

    `state_dict` may be called after any sample. A stream with a loaded state continues after that
    sample; if the state was saved between two epochs, it begins the second epoch.
    """

    suits_any_ranks = (
        False  # whether the state is the same on all ranks, so that any number of ranks can load it
    )

    def __init__(self) -> None:
        self.epoch = 0
        self._is_loaded = self._is_in_epoch = False

    def __iter__(self) -> Iterator[Any]:
        """Yields the samples of an epoch, or after `load_state_dict` its remaining samples."""
        if self._is_in_epoch and not self._is_loaded:
            self.next_epoch()
        self._is_loaded = False
        self._is_in_epoch = True
        yield from self._samples()
        # An exhausted worker stays at its end: other workers may still have samples of this epoch.
        if get_worker_info() is None:
            self.next_epoch()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it has begun already."""
        if epoch != self.epoch:
            self.next_epoch()
            self.epoch = epoch

    def next_epoch(self) -> None:
        """Skips the rest of the epoch."""
        self.epoch += 1
        self._is_loaded = self._is_in_epoch = False
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position: plain values, and the buffered samples."""
        return {"epoch": self.epoch, **self._position()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self._begin()
        self.epoch = state["epoch"]
        self._go_to(state)
        self._is_loaded = self._is_in_epoch = True

    def _begin(self) -> None:
        """Goes to the start of an epoch."""

    @abstractmethod
    def _samples(self) -> Iterator[Any]:
        """Yields samples from the position on; updates the position before each yield."""

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Returns the state without the epoch."""

    @abstractmethod
    def _go_to(self, state: Mapping[str, Any]) -> None:
        """Goes to a position of the epoch."""


class Position:
    """The position in another iterable, which may or may not have its own state.

    Without its own state, the samples already used are read again and dropped.

    Args:
        samples: an iterable that can be iterated over repeatedly.

    Attributes:
        num_read: number of samples of the epoch already used.
        num_passes: number of begun or finished epochs; the epoch for `set_epoch`.
        is_over: whether there are no more samples.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        if isinstance(samples, Iterator):
            raise TypeError(
                f"a {type(samples).__name__} can be iterated over only once; give what makes it, "
                "such as a list or an object with __iter__"
            )
        self._own = samples
        self._is_loaded = False
        self._is_left = False
        self._loaded: Any = None  # until it is read
        self.num_read = 0
        self.num_passes = 0
        self.is_over = False

    @property
    def suits_any_ranks(self) -> bool:
        """Whether the position is the same on all ranks, however many there are."""
        return bool(getattr(self._own, "suits_any_ranks", False))

    def begin(self) -> None:
        """Goes to the start of an epoch; skips the rest of the current epoch."""
        self.num_passes += bool(self.num_read or self.is_over)
        if self.num_read and not self.is_over:
            if isinstance(self._own, Stream):
                self._own.next_epoch()
            self._is_left = not isinstance(self._own, Stream)
        self.num_read = 0
        self.is_over = False
        self._loaded = None

    def samples(self) -> Iterator[Any]:
        """Yields the remaining samples of the epoch."""
        if self.is_over:
            return
        if hasattr(self._own, "set_epoch") and not isinstance(self._own, Stream):
            self._own.set_epoch(self.num_passes)
        skip = 0 if isinstance(self._own, Stateful) else self.num_read
        iterator: Iterator[Any] = itertools.islice(self._own, skip, None)
        if self._is_loaded and self.num_read == 0:
            # With a state from between two epochs, some iterables begin the second, others are at the first's end.
            ahead = list(itertools.islice(iterator, 1))
            iterator = itertools.chain(ahead, iterator) if ahead else iter(self._own)
        self._is_loaded = self._is_left = False
        for sample in iterator:
            self._loaded = None
            self.num_read += 1
            yield sample
        self.is_over = True
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the position."""
        has_state = isinstance(self._own, Stateful) and not self._is_left
        iterable_state = self._own.state_dict() if has_state else None  # type: ignore[attr-defined]
        # Streams of `datasets` return the start of the epoch until they yield (5.2).
        iterable_state = iterable_state if self._loaded is None else self._loaded
        names = ("num_read", "num_passes", "is_over")
        return {**{name: getattr(self, name) for name in names}, "own": iterable_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a position from `state_dict`."""
        self.num_read = state["num_read"]
        self.is_over = state["is_over"]
        self.num_passes = state["num_passes"]
        if isinstance(self._own, Stateful) and state["own"] is not None:
            if not isinstance(self._own, Stream):
                self._loaded = copy.deepcopy(state["own"])
            self._own.load_state_dict(state["own"])
            self._is_loaded = True


def parts_of_run(ranks: tuple[int, int] | None = None) -> tuple[int, int]:
    """Returns the index of this worker among the workers of all ranks, and their number.

    Args:
        ranks: this rank and the number of ranks; by default from the environment.
    """
    worker = get_worker_info()
    num_workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
    of_all = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank, world_size = of_all if ranks is None else ranks
    return rank * num_workers + worker_id, world_size * num_workers


def drawn(seed: int, epoch: int, number: int) -> int:
    """Returns a random number from 0 to 2^64 - 1 that depends only on the arguments.

    splitmix64, of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    return mixed_bits(mixed_bits(mixed_bits(seed) + epoch) + number)


def mixed_bits(value: int) -> int:
    """Returns the next number of splitmix64 from a state of 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def require_positive(**numbers: int) -> None:
    """Raises ValueError unless each is an int of 1 or more."""
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}={value!r} is not an int of 1 or more")
