"""Composer's engine, reduced to the algorithms and callbacks that listen to an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer.core import Algorithm, Callback, Engine, Event, Trace
from composer.loggers import LoggerDestination


class LeanEngine(Engine):
    """Composer's engine, with its passes and order, but without calls that do nothing.

    Composer's own engine builds and sorts lists and formats a log line at every event, which takes longer
    than most events do. Methods with an underscore are private in mosaicml 0.32.1.
    """

    _has_own_passes = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: list[Callback] = []
        self._listening: dict[Event, list[Callback]] = {}

    def register_pass(self, *arguments: Any) -> None:
        """Adds a user's pass, which may change even a single algorithm."""
        self._has_own_passes = True
        super().register_pass(*arguments)

    def run_event(self, event: Event | str) -> dict[str, Trace]:
        """Runs algorithms, then callbacks, then loggers; at INIT in the reverse order."""
        if not isinstance(event, Event):
            event = Event(event)  # only for a name: the lookup is slow
        state = self.state
        if event is Event.INIT or state.profiler is not None or self._is_closed:
            all_traces: dict[str, Trace] = super().run_event(event)
            return all_traces
        traces = self._run_algorithms(event)
        if state.callbacks != self._known:
            self._known = list(state.callbacks)
            self._listening = {}
        listening = self._listening.get(event)
        if listening is None:
            listening = self._listening[event] = _in_order(event, state.callbacks)
        for callback in listening:
            callback.run_event(event, state, self.logger)
        return traces

    def _run_algorithms(self, event: Event) -> dict[str, Trace]:
        state = self.state
        matching = [algorithm for algorithm in state.algorithms if algorithm.match(event, state)]
        if not matching:
            return {}
        if len(matching) > 1 or self._has_own_passes:
            matching = self._compile(matching, event)
        traces = {}
        for order, algorithm in enumerate(matching):
            code = algorithm.apply(event, state, self.logger)
            traces[f"{algorithm}/{event}"] = Trace(
                type(algorithm).__name__, event, code, order, run=True
            )
        names = (f"algorithm_traces/{trace.name}/{trace.event}" for trace in traces.values())
        self.logger.log_traces(dict.fromkeys(names, 1))
        return traces


def listens(event: Event, algorithms: Sequence[Algorithm], callbacks: Sequence[Callback]) -> bool:
    """Whether an algorithm or a callback could do something at an event.

    An algorithm decides at the event itself. A callback listens if it overrides the event's method or
    `run_event`.
    """
    return bool(algorithms) or any(_listens(callback, event) for callback in callbacks)


def _listens(callback: Callback, event: Event) -> bool:
    return any(_is_own(callback, name) for name in (event.value, "run_event"))


def _is_own(callback: Callback, name: str) -> bool:
    in_class = getattr(type(callback), name, None) is not getattr(Callback, name, None)
    return in_class or name in vars(callback)


def _in_order(event: Event, callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks that listen, loggers last, so that they write the numbers of other callbacks."""
    listening = [callback for callback in callbacks if _listens(callback, event)]
    return sorted(listening, key=lambda callback: isinstance(callback, LoggerDestination))
