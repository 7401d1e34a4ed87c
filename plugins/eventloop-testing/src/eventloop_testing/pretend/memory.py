"""Memory of the pretend device: the amount allocated, and the last accesses on each stream."""

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
    """Counts of allocated memory.

    Attributes:
        allocated: number of bytes that tensors hold now.
        peak: maximum number of bytes held.
        limit: number of bytes beyond which an allocation fails.
        num_allocations, num_failed: number of allocations, and of failed allocations.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = self.num_allocations = self.num_failed = 0
        self.limit = TOTAL_BYTES

    def take(self, num_bytes: int) -> None:
        """Counts an allocation; raises torch.OutOfMemoryError beyond the limit."""
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
        storage: the memory on the host that represents it.
    """

    __slots__ = ("__weakref__", "_line", "_num_bytes", "_reads", "_recorded", "_unread", "_users",
                 "_written", "storage")  # fmt: skip

    def __init__(self, storage: Any) -> None:
        self._num_bytes = 0  # for __del__, if the allocation fails
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
        """Records a read by work queued on a line; raises RaceError if it is a race."""
        self._use(line)
        _check(line, *self._written, "wrote")
        self._reads[line.number] = line.position

    def write(self, line: lines.Line) -> None:
        """Records a write by work queued on a line; raises RaceError if it is a race."""
        self._use(line)
        _check(line, *self._written, "wrote")
        for number, position in self._reads.items():
            _check(line, number, position, "read")
        self._reads.clear()
        self._written = (line.number, line.position)

    def fill_from(self, copy: CopyFromHost) -> None:
        """Records a copy from pinned memory, whose source is checked at the first use."""
        self._unread.append(copy)

    def record_stream(self, line: lines.Line) -> None:
        """Prevents the memory from being reused before a stream has finished with it."""
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
        users = [user for user in self._users.items() if user[0] not in self._recorded]
        _freed.setdefault(self._line.number, []).extend(users)


_blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
_pinned: dict[int, Any] = {}
# Last uses of freed memory by other streams, by the stream that may reuse it.
_freed: dict[int, list[tuple[int, int]]] = {}


def block_of(raw: Tensor) -> Block:
    """Returns the device allocation that a host tensor backs; creates it if necessary."""
    storage = raw.untyped_storage()
    return _blocks.get(key_of(storage)) or Block(storage)


def forget_freed() -> None:
    """Prevents later allocations from reusing freed memory."""
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


def _check(line: lines.Line, number: int, position: int, access: str) -> None:
    if not line.is_after(number, position):
        fail(
            RaceError(
                f"stream {line.number} uses a tensor that stream {number} {access}, and hasn't waited "
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
