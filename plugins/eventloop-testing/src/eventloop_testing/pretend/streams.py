"""Streams and events of the pretend device, with the methods of a GPU's streams and events."""

from __future__ import annotations

import time
from typing import Any, Self

import torch

from eventloop_testing.pretend import lines
from eventloop_testing.pretend.private import DEVICE_TYPE, selected
from eventloop_testing.pretend.waits import waited

_streams: dict[int, Stream] = {}


class Stream(torch.Stream):
    """A queue of work; made by `torch.Stream(device="pretend")`."""

    line: lines.Line

    def __new__(
        cls, device: Any = None, priority: int = 0, *, line: lines.Line | None = None
    ) -> Self:
        """Makes a stream with a new line, or the stream of a line."""
        line = lines.new_line() if line is None else line
        stream = super().__new__(
            cls, stream_id=line.number, device_index=selected().index, device_type=DEVICE_TYPE
        )
        stream.line = line
        return stream

    def __init__(self, *_: object, **__: object) -> None:
        self._previous_lines: list[lines.Line] = []

    def __enter__(self) -> Self:
        self._previous_lines.append(lines.current())
        lines.set_current(self.line)
        return self

    def __exit__(self, *_: object) -> None:
        lines.set_current(self._previous_lines.pop())

    def synchronize(self) -> None:
        """Waits on the host until all work queued on the stream has finished."""
        waited("Stream.synchronize")
        lines.host_waits(self.line.clock())

    def query(self) -> bool:
        """Whether the host has waited for all work queued on the stream."""
        return lines.is_all_done(self.line.clock())

    def wait_stream(self, stream: Any) -> None:
        """Makes work queued later begin after all work queued on another stream."""
        self.line.wait(stream.line.clock())

    def wait_event(self, event: Any) -> None:
        """Makes work queued later begin after an event."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Records an event, by default a new event, and returns it."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event(torch.Event):
    """A mark in a stream; made by `torch.Event(device="pretend")`.

    For work that the host hasn't waited for, `query` returns False the first time and True the second
    time: as late as possible for a loop that polls.
    """

    def __new__(cls, enable_timing: bool = False) -> Self:
        """Makes an event that was never recorded."""
        return super().__new__(cls, selected(), enable_timing=enable_timing)

    def __init__(self, enable_timing: bool = False) -> None:
        self._clock: lines.Clock = {}
        self._is_asked = False
        self._has_time = enable_timing
        self._time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Marks the position of a stream, by default the current stream."""
        line = lines.current() if stream is None else stream.line
        line.advance()
        self._clock = line.clock()
        self._is_asked = False
        self._time_s = time.perf_counter() if self._has_time else None

    def wait(self, stream: Any = None) -> None:
        """Makes work queued later on a stream begin after the mark."""
        (lines.current() if stream is None else stream.line).wait(self._clock)

    def query(self) -> bool:
        """Whether all work before this event has finished."""
        if lines.is_all_done(self._clock):
            return True
        if not self._is_asked:
            self._is_asked = True
            return False
        lines.host_waits(self._clock)
        return True

    def synchronize(self) -> None:
        """Waits on the host until all work before this event has finished."""
        waited("Event.synchronize")
        lines.host_waits(self._clock)

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds between two marks, both of which the host has waited for."""
        for event in (self, end_event):
            if event._time_s is None:
                raise ValueError("the event has no time: give enable_timing=True, and record it")
            if not lines.is_all_done(event._clock):
                raise RuntimeError("the event isn't complete: wait for it with synchronize()")
        return 1000 * float(end_event._time_s - self._time_s)


def stream_of(line: lines.Line) -> Stream:
    """Returns the stream of a line, the same each time."""
    if line.number not in _streams:
        _streams[line.number] = Stream(line=line)
    return _streams[line.number]
