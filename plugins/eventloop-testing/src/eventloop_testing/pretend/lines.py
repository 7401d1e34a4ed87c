"""Tracks which work is known to be complete, on a device whose work is computed immediately.

Each line of work, a stream, has a position, and knows up to which position it has waited for each other
line; so does the host. Two accesses to the same memory are ordered if the later access's line, or the
host before it queued that access, has waited for the position of the earlier access.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Clock = dict[int, int]  # a position for each line, by its number


class Line:
    """The work queued on a stream.

    Attributes:
        number: identifies the line; 0 is the default stream.
        position: number of operations queued on it.
        seen: position up to which it has waited for each other line.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.position = 0
        self.seen: Clock = {}

    def advance(self) -> int:
        """Queues an operation; returns its position."""
        self.position += 1
        return self.position

    def clock(self) -> Clock:
        """Returns the positions that are complete once all work queued so far is complete."""
        return {**self.seen, self.number: self.position}

    def wait(self, clock: Mapping[int, int]) -> None:
        """Makes work queued later begin after a clock."""
        _merge(self.seen, clock)

    def is_after(self, number: int, position: int) -> bool:
        """Whether work queued now begins after a position of a line."""
        is_own = number == self.number
        return is_own or self.seen.get(number, 0) >= position or is_done(number, position)


DEFAULT = Line(0)
_lines: dict[int, Line] = {0: DEFAULT}
_numbers = itertools.count(1)
_thread = threading.local()
_host: Clock = {}
_settling: list[Callable[[], None]] = []


def new_line() -> Line:
    """Returns a line without work."""
    line = Line(next(_numbers))
    _lines[line.number] = line
    return line


def line_of(number: int) -> Line:
    """Returns the line with a number."""
    return _lines[number]


def current() -> Line:
    """Returns the line on which this thread queues its work."""
    line: Line = getattr(_thread, "line", DEFAULT)
    return line


def set_current(line: Line) -> None:
    """Makes this thread queue its work on a line."""
    _thread.line = line


@contextmanager
def on(line: Line) -> Iterator[None]:
    """Makes this thread queue its work on a line, inside its context."""
    previous_line = current()
    set_current(line)
    try:
        yield
    finally:
        set_current(previous_line)


def is_done(number: int, position: int) -> bool:
    """Whether the host has waited for a position of a line."""
    return _host.get(number, 0) >= position


def is_all_done(clock: Mapping[int, int]) -> bool:
    """Whether the host has waited for a clock."""
    return all(is_done(number, position) for number, position in clock.items())


def host_waits(clock: Mapping[int, int] | None = None) -> None:
    """Makes the host wait for `clock`, by default all lines, and completes the copies that this finishes."""
    if clock is None:
        clock = {line.number: line.position for line in _lines.values()}
    _merge(_host, clock)
    for settle in _settling:
        settle()


def when_the_host_waits(settle: Callable[[], None]) -> None:
    """Registers a function to call each time after the host has waited."""
    _settling.append(settle)


def _merge(clock: Clock, later_clock: Mapping[int, int]) -> None:
    for number, position in later_clock.items():
        clock[number] = max(clock.get(number, 0), position)
