"""A weighted mixture of streams that can be resumed at any sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from eventloop_streaming.stream import Position, Stream, drawn

Stop = Literal["first", "all", "repeat"]


class Mixed(Stream):
    """Yields samples of several streams; draws a stream for each sample, by weight.

    Args:
        streams: streams by name, each as in `Shuffled`.
        weights: positive weights by name, in any scale; by default equal.
        seed: seed of the draws.
        stop: when an epoch ends. "first": when a drawn stream has no more samples. "all": when no stream
            has any; an exhausted stream isn't drawn any more. "repeat": when all streams have been
            exhausted; an exhausted stream starts again.
    """

    def __init__(
        self,
        streams: Mapping[str, Iterable[Any]],
        weights: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None:
        weights = dict.fromkeys(streams, 1.0) if weights is None else weights
        if not streams or streams.keys() != weights.keys():
            raise ValueError(f"streams are {[*streams]}, weights are of {[*weights]}")
        if not all(0 < weight < float("inf") for weight in weights.values()):
            raise ValueError(f"weights={dict(weights)!r} aren't all more than 0")
        if stop not in ("first", "all", "repeat"):
            raise ValueError(f"stop={stop!r} is none of first, all, repeat")
        super().__init__()
        self._sources = {name: Position(stream) for name, stream in streams.items()}
        self._weights = {name: float(weights[name]) for name in streams}
        self.seed = seed
        self.stop = stop
        self._begin()

    def _begin(self) -> None:
        for source in self._sources.values():
            source.begin()
        self._ended: list[str] = []
        self._num_drawn = 0

    def _samples(self) -> Iterator[Any]:
        iterators = {name: position.samples() for name, position in self._sources.items()}
        while len(self._ended) < len(self._sources):
            name = self._draw()
            for sample in itertools.islice(iterators[name], 1):
                yield sample
                break
            else:
                if self.stop == "first":
                    return
                if name not in self._ended:
                    self._ended.append(name)
                if self.stop == "repeat" and len(self._ended) < len(self._sources):
                    if not self._sources[name].num_read:
                        raise ValueError(f"the stream {name!r} has no sample to repeat")
                    self._sources[name].begin()
                    iterators[name] = self._sources[name].samples()

    def _draw(self) -> str:
        """Returns the name of a stream; only of streams that aren't exhausted, unless they are repeated."""
        out = self._ended if self.stop == "all" else ()
        weights = {name: weight for name, weight in self._weights.items() if name not in out}
        self._num_drawn += 1
        remaining_weight = (
            drawn(self.seed, self.epoch, self._num_drawn) / 2**64 * sum(weights.values())
        )
        for name, weight in weights.items():
            remaining_weight -= weight
            if remaining_weight < 0:
                return name
        return name

    def _position(self) -> dict[str, Any]:
        sources = {name: position.state_dict() for name, position in self._sources.items()}
        return {"ended": list(self._ended), "num_drawn": self._num_drawn, "sources": sources}

    def _go_to(self, state: Mapping[str, Any]) -> None:
        if state["sources"].keys() != self._sources.keys():
            raise ValueError(
                f"the saved streams are {', '.join(state['sources'])}, not {', '.join(self._sources)}"
            )
        self._ended = list(state["ended"])
        self._num_drawn = state["num_drawn"]
        for name, source in self._sources.items():
            source.load_state_dict(state["sources"][name])
