"""Memory of the pretend device: how much is allocated, and who accessed it last on which stream."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from eventloop_testing.pretend import lines
from eventloop_testing.pretend.copies import CopyFromHost
from eventloop_testing.pretend.errors import RaceError
from eventloop_testing.pretend.failing import fail
from eventloop_testing.pretend.private import key_of, weakly

TOTAL_BYTES = 16 * 2**30


class Counts:
    """How much memory there is and was.

    Attributes:
        allocated: bytes that tensors hold now.
        peak: the most that they held.
        limit: bytes beyond which an allocation fails.
        num_allocations, num_failed: how often memory was taken, and wasn't there.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = self.num_allocations = self.num_failed = 0
        self.limit = TOTAL_BYTES

    def take(self, num_bytes: int) -> None:
        """Counts an allocation; raises torch.OutOfMemoryError where the limit doesn't suffice."""
        if self.allocated + num_bytes > self.limit:
            self.num_failed += 1
            fail(
                torch.OutOfMemoryError(
                    f"PRETEND out of memory. Tried to allocate {num_bytes} bytes; {self.allocated} "
                    f"of {self.limit} are allocated"
                )
            )
        self.allocated += num_bytes
        self.peak = max(self.peak, min(self.allocated, self.limit))
        self.num_allocations += 1


COUNTS = Counts()


class Block:
    """An allocation, which a tensor and its views share.

    Args:
        storage: the memory of the host that stands for it.
    """

    __slots__ = ("__weakref__", "_line", "_num_bytes", "_reads", "_recorded", "_unread", "_users",
                 "_written", "storage")  # fmt: skip

    def __init__(self, storage: Any) -> None:
        self._num_bytes = 0  # for __del__, where there isn't enough
        self._line = lines.current()
        self._users: dict[int, int] = {}  # positions of other lines
        self._recorded: set[int] = set()
        _check_freed(self._line)
        COUNTS.take(storage.nbytes())
        self.storage = storage
        self._num_bytes = storage.nbytes()
        self._written = (self._line.number, self._line.position)
        self._reads: dict[int, int] = {}
        self._unread: list[CopyFromHost] = []
        _blocks[key_of(storage)] = self

    def read(self, line: lines.Line) -> None:
        """Notes that what is queued on a line reads it; raises RaceError if that is a race."""
        self._use(line)
        _check(line, *self._written, "wrote")
        self._reads[line.number] = line.position

    def write(self, line: lines.Line) -> None:
        """Notes that what is queued on a line writes it; raises RaceError if that is a race."""
        self._use(line)
        _check(line, *self._written, "wrote")
        for number, position in self._reads.items():
            _check(line, number, position, "read")
        self._reads.clear()
        self._written = (line.number, line.position)

    def fill_from(self, copy: CopyFromHost) -> None:
        """Notes a copy from pinned memory, whose source is checked at the first use."""
        self._unread.append(copy)

    def record_stream(self, line: lines.Line) -> None:
        """Has the memory not be used for anything else before a stream is done with it."""
        self._recorded.add(line.number)

    def _use(self, line: lines.Line) -> None:
        if line is not self._line:
            self._users[line.number] = line.position
        while self._unread:
            copy = self._unread.pop()
            if not lines.is_done(copy.number, copy.position):
                copy.check()

    def __del__(self) -> None:
        COUNTS.allocated -= self._num_bytes
        users = [one for one in self._users.items() if one[0] not in self._recorded]
        _freed.setdefault(self._line.number, []).extend(users)


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
_pinned: dict[int, Any] = {}
# Streams that used freed memory, up to which position, by the stream that may take it again.
_freed: dict[int, list[tuple[int, int]]] = {}


def block_of(raw: Tensor) -> Block:
    """Returns the device allocation that a host tensor backs; creates it if there is none."""
    storage = raw.untyped_storage()
    return _blocks.get(key_of(storage)) or Block(storage)


def forget_freed() -> None:
    """Has no allocation take memory that was freed before."""
    _freed.clear()


def pin(tensor: Tensor) -> Tensor:
    """Marks the memory of a tensor of the host as pinned; returns the tensor."""
    for key in [key for key, storage in _pinned.items() if storage.expired()]:
        del _pinned[key]
    storage = tensor.untyped_storage()
    _pinned[key_of(storage)] = weakly(storage)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether the memory of a tensor of the host is pinned."""
    return key_of(tensor.untyped_storage()) in _pinned


def _check(line: lines.Line, number: int, position: int, did: str) -> None:
    if not line.is_after(number, position):
        fail(
            RaceError(
                f"stream {line.number} uses a tensor that stream {number} {did}, and hasn't waited "
                "for it: call stream.wait_stream(other), or stream.wait_event(event) of an event "
                "recorded after that"
            )
        )


def _check_freed(line: lines.Line) -> None:
    """Raises RaceError if an allocation may take memory that another stream still uses."""
    for number, position in _freed.pop(line.number, ()):
        if not line.is_after(number, position):
            fail(
                RaceError(
                    f"memory of stream {line.number} was freed and is taken again while stream "
                    f"{number} may still use it: call tensor.record_stream(stream), or have the "
                    "one wait for the other"
                )
            )
