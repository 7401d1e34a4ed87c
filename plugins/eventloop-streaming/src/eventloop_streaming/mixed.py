"""A weighted mixture of streams that can be resumed at any sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from eventloop_streaming.stream import Position, Stream, drawn

Stop = Literal["first", "all", "repeat"]


class Mixed(Stream):
    """Yields samples of several streams, each time of one that is drawn by its weight.

    Args:
        streams: by name; each as `Shuffled` takes it.
        weights: by the same names, more than 0; they needn't sum to 1. Equal unless given.
        seed: another one draws otherwise.
        stop: when an epoch ends. "first": when a stream that is drawn has no more samples. "all": when
            none has; one that has none is no longer drawn. "repeat": likewise, and one that has none
            begins again, until each has been at its end.
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
        self._sources = {name: Position(one) for name, one in streams.items()}
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
        iterators = {name: one.samples() for name, one in self._sources.items()}
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
        """Returns the name of a stream; of those that are over none, unless they are repeated."""
        out = self._ended if self.stop == "all" else ()
        weights = {name: one for name, one in self._weights.items() if name not in out}
        self._num_drawn += 1
        at = drawn(self.seed, self.epoch, self._num_drawn) / 2**64 * sum(weights.values())
        for name, weight in weights.items():
            at -= weight
            if at < 0:
                return name
        return name

    def _position(self) -> dict[str, Any]:
        sources = {name: one.state_dict() for name, one in self._sources.items()}
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
