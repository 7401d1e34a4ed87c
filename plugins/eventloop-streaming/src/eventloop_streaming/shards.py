"""A stream of shards, such as files, divided over ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eventloop_streaming.stream import Position, Stream, drawn, parts_of_run


class Shards(Stream):
    """Yields the samples of shards; the order of shards is random, the order within a shard is fixed.

    Each rank takes every n-th shard of an epoch, and so does each worker of a `StatefulDataLoader`. If
    shards differ in their number of samples, so do ranks.

    Args:
        shards: paths or URLs, or other arguments for `read`.
        read: takes a shard; returns an iterable of its samples, the same each time. When a run resumes
            within a shard, the samples already used are read again and dropped.
        shuffle: whether to shuffle the shards, differently in each epoch.
        seed: seed of the order.
        ranks: this rank's number among the ranks that split the data, and their number:
            (state.data_rank, state.data_world_size). By default RANK and WORLD_SIZE.
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
        worker_idx, num_workers = parts_of_run(self._ranks)
        return [self.shards[idx] for idx in order[worker_idx::num_workers]]

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
    """Yields every n-th sample of a stream, for n ranks and workers, each of which reads the whole stream.

    The remainder at the end is dropped, so that all get the same number of samples. For streams without
    shards, or with too few. A run may resume in mid-epoch with another number of ranks.

    Args:
        samples: a stream, as in `Shuffled`; the same on every rank.
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
        worker_idx, num_workers = parts_of_run(self._ranks)
        sample_of_worker = None
        start = self._source.num_read
        for sample in self._source.samples():
            position = (self._source.num_read - 1 - start) % num_workers
            sample_of_worker = sample if position == worker_idx else sample_of_worker
            if position == num_workers - 1:
                yield sample_of_worker

    def _position(self) -> dict[str, Any]:
        return {"source": self._source.state_dict()}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state["source"])


class StreamState(Stream):
    """Yields the samples of a stream unchanged, with a state that is complete at any time.

    After loading a state, a `datasets` stream returns the start of its epoch until it yields a sample, and workers
    that haven't yielded any save that position (datasets 5.2 with torchdata 0.11).

    Args:
        samples: a stream, as in `Shuffled`.
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
