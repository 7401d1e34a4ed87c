"""The bulletin: how ranks report failures to each other through torchrun's store.

Errors are never sent by a collective, which can block forever. The store needs only the process
that hosts it: torchrun's agent, `eventloop --nproc`, or rank 0.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from eventloop.distributed.attempt import attempt, connect
from eventloop.distributed.exit import Words, in_ranks

_PATIENCE = timedelta(seconds=4)
_MOST_CHARS = 50_000


@dataclass(frozen=True)
class Failure:
    """A failure that all ranks can read.

    Args:
        rank: the rank that failed.
        line: what happened, and which plugin caused it.
        details: further lines of the report.
        status: the exit status.
        reported_by: the rank that posted it; another one if `rank` can't.
    """

    rank: int
    line: str
    details: str = ""
    status: int = 1
    reported_by: int = -1

    @property
    def report(self) -> str:
        """The lines for stderr."""
        return f"{self.line}\n{self.details}"


@dataclass(frozen=True)
class Member:
    """A rank's last record of itself; rewriting it is its heartbeat.

    Args:
        machine: the machine or container of its process id.
        is_inside: whether it runs something that needs all ranks, so it mustn't exit.
        num_beats: grows while its watchdog runs, and so while its process runs Python.
        line: which line it is at, if it hasn't moved for long or was asked; else "".
        num_batches: how many batches it has begun.
    """

    machine: str
    pid: int
    is_inside: bool
    num_beats: int = 0
    line: str = ""
    num_batches: int = 0

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.machine == _machine()


class Bulletin:
    """The failure reports of one attempt of a run; a restart by torchrun uses another one.

    Failures are numbered per process: ranks that all raise and continue look for the same next
    number. A rank that continued alone looks for another number than the others.

    Args:
        store: a connection that only this object uses.
        rank: of this process.
        world_size: the number of ranks.
        attempt: the name of the attempt.

    Attributes:
        is_inside: whether this process runs something that needs all ranks.
        has_failed: whether that has ended with an exception.
        num_batches: how many batches this process has begun.
        words: chooses those of Python, or of the shell if a command runs.
    """

    def __init__(self, store: TCPStore, rank: int, world_size: int, attempt: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._attempt = f"eventloop/{attempt}"
        self._num_failures = self._num_beats = 0
        self._beating = threading.Lock()
        self.has_failed = self.is_inside = False
        self.num_batches = 0
        self.words: Words = str

    def post(self, failure: Failure) -> Failure:
        """Posts a failure; returns the one that was posted first, which may be another's."""
        return _failure(self._store.compare_set(self._key("failure"), "", _text(failure)))

    def first_failure(self) -> Failure | None:
        """Returns the first failure posted; None without one."""
        text = self._read(self._key("failure"))
        return None if text is None else _failure(text)

    def claim(self) -> bool:
        """Claims the writing of the failure to stderr; returns whether this rank got it."""
        teller = self._store.compare_set(self._key("teller"), "", str(self.rank))
        return teller.decode() == str(self.rank)

    def set_reported(self) -> None:
        """Records that the failure has been written to stderr."""
        self._store.set(self._key("told"), "yes")

    def is_reported(self) -> bool:
        """Returns whether the failure has been written to stderr."""
        return self._store.check([self._key("told")])

    def replace(self, failure: Failure) -> None:
        """Replaces the report of a failure that this rank posted first."""
        self._store.set(self._key("failure"), _text(failure))

    def enter(self) -> None:
        """Announces that this process enters something that needs all ranks."""
        if self.has_failed:
            self.has_failed = False
            self._num_failures += 1
            self.num_batches = self._num_failures << 40  # alike again on all ranks
        self.is_inside = True
        self.beat()

    def leave(self) -> None:
        """Announces that this process has left it, and can exit."""
        self.is_inside = False
        self.beat()

    def beat(self, line: str = "") -> None:
        """Rewrites this rank's record, as a sign that it is running."""
        with self._beating:  # a watchdog's beat mustn't undo what `leave` has just written
            self._num_beats += 1
            facts = (self.is_inside, self._num_beats, line, self.num_batches)
            member = Member(_machine(), os.getpid(), *facts)
            self._store.set(self._member_key(self.rank), json.dumps(astuple(member)))

    def member(self, rank: int) -> Member | None:
        """Returns a rank's record; None if it has never been inside."""
        text = self._read(self._member_key(rank))
        return None if text is None else Member(*json.loads(text))

    def members(self) -> dict[int, Member | None]:
        """Returns the records of all ranks."""
        return {rank: self.member(rank) for rank in range(self.world_size)}

    def finish(self) -> None:
        """Announces that this rank has finished."""
        self.leave()
        self._store.add(f"{self._attempt}/num_done", 1)

    def all_are_done(self) -> bool:
        """Returns whether every rank has finished."""
        return self._store.add(f"{self._attempt}/num_done", 0) == self.world_size

    def part(self) -> None:
        """Disconnects when all ranks have finished; the rank that hosts the store goes last."""
        num_gone = functools.partial(self._store.add, f"{self._attempt}/num_gone")
        if self.rank:
            num_gone(1)
        else:
            wait_until(lambda: num_gone(0) == self.world_size - 1, _PATIENCE.total_seconds())

    def _member_key(self, rank: int) -> str:
        return f"{self._attempt}/member/{rank}"

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{self._num_failures}/{name}"

    def _read(self, key: str) -> bytes | None:
        # `get` would wait for a key that isn't there.
        return self._store.get(key) if self._store.check([key]) else None


def bulletin() -> Bulletin | None:
    """Returns this process's bulletin; None for a single process, or without a reachable store."""
    return _connected(os.getpid()) if in_ranks() else None


def wait_until(condition: Callable[[], bool], seconds: float, *, poll_s: float = 0.02) -> bool:
    """Polls a condition; returns whether it became true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(poll_s)
    return is_true


@functools.cache
def _connected(_pid: int) -> Bulletin | None:
    """Connects once per process, as a fork mustn't share its parent's connection."""
    try:
        store = connect(_PATIENCE)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError, RuntimeError, OSError):
        return None  # the group was made in another way, which tells of no store
    return Bulletin(store, rank, world_size, attempt())


def _text(failure: Failure) -> str:
    return json.dumps(asdict(failure) | {"details": failure.details[:_MOST_CHARS]})


def _failure(text: bytes) -> Failure:
    return Failure(**json.loads(text))


@functools.cache
def _machine() -> str:
    """Returns a name for the machine or container in which process ids are unique."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
