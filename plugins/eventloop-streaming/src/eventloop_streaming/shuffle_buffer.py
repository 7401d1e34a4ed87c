"""A shuffle buffer with a state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eventloop_streaming.stream import Position, Stream, drawn, require_positive


class Shuffled(Stream):
    """Yields the samples of a stream in random order, from a buffer of upcoming samples.

    The buffer is part of the state: a resumed run yields the same samples in the same order.
    Each epoch has another order.

    Args:
        samples: an iterable that can be iterated over repeatedly. With `state_dict` and `load_state_dict`
            it resumes itself; otherwise the samples already used are read again and dropped.
        buffer_size: number of samples in the buffer; a larger buffer shuffles better, and makes larger
            checkpoints.
        seed: seed of the order.
    """

    def __init__(self, samples: Iterable[Any], buffer_size: int, *, seed: int = 0) -> None:
        require_positive(buffer_size=buffer_size)
        super().__init__()
        self._source = Position(samples)
        self.buffer_size = buffer_size
        self.seed = seed
        self._begin()

    def _begin(self) -> None:
        self._source.begin()
        self._buffer: list[Any] = []
        self._num_drawn = 0

    def _samples(self) -> Iterator[Any]:
        for sample in self._source.samples():
            if len(self._buffer) < self.buffer_size:
                self._buffer.append(sample)
                continue
            idx = self._draw()
            picked, self._buffer[idx] = self._buffer[idx], sample
            yield picked
        while self._buffer:
            idx = self._draw()
            self._buffer[idx], self._buffer[-1] = self._buffer[-1], self._buffer[idx]
            yield self._buffer.pop()

    def _draw(self) -> int:
        self._num_drawn += 1
        return drawn(self.seed, self.epoch, self._num_drawn) % len(self._buffer)

    def _position(self) -> dict[str, Any]:
        return {
            "buffer": list(self._buffer),
            "num_drawn": self._num_drawn,
            "source": self._source.state_dict(),
        }

    def _go_to(self, state: Mapping[str, Any]) -> None:
        self._buffer = list(state["buffer"])
        self._num_drawn = state["num_drawn"]
        self._source.load_state_dict(state["source"])
