"""What is known to be done before what, on a device whose work is computed at once.

Each line of work, a stream, has a position, and knows up to which position of each other one it has
waited; so does the host. Two accesses to one piece of memory are in order where the later one's line,
or the host before that was queued, has waited for the position of the earlier one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Clock = dict[int, int]  # a position for each line, by its number


class Line:
    """The work queued on one stream.

    Attributes:
        number: names it; 0 is the default stream.
        position: how many operations were queued on it.
        seen: up to which position it has waited for each other line.
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
        """Returns what is done when all that is queued now is done."""
        return {**self.seen, self.number: self.position}

    def wait(self, clock: Mapping[int, int]) -> None:
        """Has what is queued from now on begin after a clock."""
        _merge(self.seen, clock)

    def is_after(self, number: int, position: int) -> bool:
        """Whether what is queued now begins after a position of a line."""
        is_own = number == self.number
        return is_own or self.seen.get(number, 0) >= position or is_done(number, position)


DEFAULT = Line(0)
_all: dict[int, Line] = {0: DEFAULT}
_numbers = itertools.count(1)
_thread = threading.local()
_host: Clock = {}
_settling: list[Callable[[], None]] = []


def new_line() -> Line:
    """Returns a line without work."""
    line = Line(next(_numbers))
    _all[line.number] = line
    return line


def line_of(number: int) -> Line:
    """Returns the line with a number."""
    return _all[number]


def current() -> Line:
    """Returns the line on which this thread queues its work."""
    line: Line = getattr(_thread, "line", DEFAULT)
    return line


def set_current(line: Line) -> None:
    """Has this thread queue its work on a line from now on."""
    _thread.line = line


@contextmanager
def on(line: Line) -> Iterator[None]:
    """Has this thread queue its work on a line inside its `with`."""
    before = current()
    set_current(line)
    try:
        yield
    finally:
        set_current(before)


def is_done(number: int, position: int) -> bool:
    """Whether the host has waited for a position of a line."""
    return _host.get(number, 0) >= position


def is_all_done(clock: Mapping[int, int]) -> bool:
    """Whether the host has waited for a clock."""
    return all(is_done(number, position) for number, position in clock.items())


def host_waits(clock: Mapping[int, int] | None = None) -> None:
    """Makes the host wait for `clock`, by default all lines, and settles what that completes."""
    _merge(_host, {one.number: one.position for one in _all.values()} if clock is None else clock)
    for settle in _settling:
        settle()


def when_the_host_waits(settle: Callable[[], None]) -> None:
    """Has a function be called each time that the host has waited."""
    _settling.append(settle)


def _merge(clock: Clock, other: Mapping[int, int]) -> None:
    for number, position in other.items():
        clock[number] = max(clock.get(number, 0), position)
