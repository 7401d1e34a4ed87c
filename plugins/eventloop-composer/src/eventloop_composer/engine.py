"""Composer's engine, which calls what listens to an event and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer.core import Algorithm, Callback, Engine, Event, Trace
from composer.loggers import LoggerDestination


class LeanEngine(Engine):
    """Composer's engine: its passes and its order, without the calls that do nothing.

    Its own makes lists, sorts them by each pass and formats a line for a log at every event, which takes
    longer than most events do. Methods with an underscore are those of mosaicml 0.32.1.
    """

    _has_own_passes = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._known: list[Callback] = []
        self._listening: dict[Event, list[Callback]] = {}

    def register_pass(self, *given: Any) -> None:
        """Adds one of the user's passes, which may do something to a single algorithm, too."""
        self._has_own_passes = True
        super().register_pass(*given)

    def run_event(self, event: Event | str) -> dict[str, Trace]:
        """Runs algorithms, then callbacks, then loggers; at INIT it is the other way round."""
        if not isinstance(event, Event):
            event = Event(event)  # a name; to look an event up takes long, too
        state = self.state
        if event is Event.INIT or state.profiler is not None or self._is_closed:
            found: dict[str, Trace] = super().run_event(event)
            return found
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
        matching = [one for one in state.algorithms if one.match(event, state)]
        if not matching:
            return {}
        if len(matching) > 1 or self._has_own_passes:
            matching = self._compile(matching, event)
        traces = {}
        for order, one in enumerate(matching):
            code = one.apply(event, state, self.logger)
            traces[f"{one}/{event}"] = Trace(type(one).__name__, event, code, order, run=True)
        names = (f"algorithm_traces/{one.name}/{one.event}" for one in traces.values())
        self.logger.log_traces(dict.fromkeys(names, 1))
        return traces


def listens(event: Event, algorithms: Sequence[Algorithm], callbacks: Sequence[Callback]) -> bool:
    """Whether an algorithm or a callback could do something at an event.

    An algorithm says so at the event itself. A callback does where it has a method of the event's
    name, or takes all events.
    """
    return bool(algorithms) or any(_listens(one, event) for one in callbacks)


def _listens(callback: Callback, event: Event) -> bool:
    return any(_is_own(callback, name) for name in (event.value, "run_event"))


def _is_own(callback: Callback, name: str) -> bool:
    in_class = getattr(type(callback), name, None) is not getattr(Callback, name, None)
    return in_class or name in vars(callback)


def _in_order(event: Event, callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns those that listen, loggers last: what callbacks log is there before it is written."""
    listening = [one for one in callbacks if _listens(one, event)]
    return sorted(listening, key=lambda one: isinstance(one, LoggerDestination))
