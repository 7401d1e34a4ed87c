"""A stream of shards, such as files, of which each rank and each worker reads its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eventloop_streaming.stream import Position, Stream, drawn, parts_of_run


class Shards(Stream):
    """Yields the samples of shards: of each its samples in order, the shards in random order.

    Of the shards of an epoch each rank takes every n-th, and so does each worker of a
    `StatefulDataLoader`. Shards with different numbers of samples give ranks different numbers, too.

    Args:
        shards: paths or URLs, or whatever `read` takes.
        read: takes a shard; returns an iterable of its samples, the same each time. In a shard in
            which a run goes on, samples that were taken are read again and dropped.
        shuffle: whether the order of the shards is random, another one each epoch.
        seed: another one gives another order.
        ranks: the number of this rank's samples and of how many, where ranks share their samples:
            (state.data_rank, state.data_world_size). RANK and WORLD_SIZE unless given.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterable[Any]],
        *,
        shuffle: bool = True,
        seed: int = 0,
        ranks: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.shards = list(shards)
        self._read = read
        self.shuffle = shuffle
        self.seed = seed
        num_parts = parts_of_run(self._ranks)[1]
        if len(self.shards) < num_parts:
            raise ValueError(
                f"there are {len(self.shards)} shards for {num_parts} ranks: each needs one"
            )
        self._begin()

    def _begin(self) -> None:
        self._num_shards = self._num_samples = 0

    def _samples(self) -> Iterator[Any]:
        for shard in self._own()[self._num_shards :]:
            for sample in itertools.islice(iter(self._read(shard)), self._num_samples, None):
                self._num_samples += 1
                yield sample
            self._num_shards = self._num_shards + 1
            self._num_samples = 0

    def _own(self) -> list[Any]:
        """Returns the shards of this rank and worker, in the order of the epoch."""
        order = list(range(len(self.shards)))
        if self.shuffle:
            order.sort(key=lambda idx: drawn(self.seed, self.epoch, idx))
        part, num_parts = parts_of_run(self._ranks)
        return [self.shards[idx] for idx in order[part::num_parts]]

    def _position(self) -> dict[str, Any]:
        return {
            "num_shards": self._num_shards,
            "num_samples": self._num_samples,
            "parts": parts_of_run(self._ranks)[1],
        }

    def _go_to(self, state: Mapping[str, Any]) -> None:
        begun = state["num_shards"] or state["num_samples"]
        if begun and state["parts"] != parts_of_run(self._ranks)[1]:
            raise ValueError(
                f"ranks times workers were {state['parts']} and are {parts_of_run(self._ranks)[1]}: in mid-epoch each "
                "goes on with its own shards"
            )
        self._num_shards = state["num_shards"]
        self._num_samples = state["num_samples"]


class Sliced(Stream):
    """Yields every n-th sample of a stream, for n ranks and workers; each of them reads all of it.

    What is left over at the end is left out, so that all have as many samples. For streams that have
    no shards, or too few. A run may go on in mid-epoch with another number of ranks.

    Args:
        samples: as `Shuffled` takes it; the same on every rank.
        ranks: as in `Shards`.
    """

    suits_any_ranks = True

    def __init__(self, samples: Iterable[Any], *, ranks: tuple[int, int] | None = None) -> None:
        super().__init__()
        self._ranks = ranks
        self._source = Position(samples)

    def _begin(self) -> None:
        self._source.begin()

    def _samples(self) -> Iterator[Any]:
        part, num_parts = parts_of_run(self._ranks)
        own = None
        start = self._source.num_read
        for sample in self._source.samples():
            at = (self._source.num_read - 1 - start) % num_parts
            own = sample if at == part else own
            if at == num_parts - 1:
                yield own

    def _position(self) -> dict[str, Any]:
        return {"source": self._source.state_dict()}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])


class StreamState(Stream):
    """Yields the samples of a stream as they are, with a state that is complete at any time.

    A stream of `datasets` that was loaded returns the start of its epoch until it yields a sample, and workers that
    haven't yielded one save that (datasets 5.2 with torchdata 0.11).

    Args:
        samples: as `Shuffled` takes it.
    """

    def __init__(self, samples: Iterable[Any]) -> None:
        super().__init__()
        self._source = Position(samples)

    def _begin(self) -> None:
        self._source.begin()

    def _samples(self) -> Iterator[Any]:
        return self._source.samples()

    def _position(self) -> dict[str, Any]:
        return {"source": self._source.state_dict()}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])
