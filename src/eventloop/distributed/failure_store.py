"""The bulletin: what ranks tell each other through torchrun's store when something goes wrong.

Errors never enter a collective, which may block forever. The store needs only the process that
holds it: torchrun's agent, `eventloop --nproc`, or else rank 0.
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
from eventloop.distributed.exit import in_ranks

_PATIENCE = timedelta(seconds=4)
_MOST_CHARS = 50_000


@dataclass(frozen=True)
class Failure:
    """A failure, as all ranks may read it.

    Args:
        rank: whose it is.
        line: what happened, and who did it.
        details: what else there is to say, in lines.
        status: which exit status it makes.
        told_by: the rank that posted it: another one where `rank` can't.
    """

    rank: int
    line: str
    details: str = ""
    status: int = 1
    told_by: int = -1

    @property
    def report(self) -> str:
        """The lines for stderr."""
        return f"{self.line}\n{self.details}"


@dataclass(frozen=True)
class Member:
    """A rank, as it last described itself; what it writes again and again is its heartbeat.

    Args:
        machine: where its process id means something.
        is_inside: whether it does what takes all ranks, and mustn't end meanwhile.
        num_beats: grows while its watchdog runs, that is, while its process runs Python.
        place: where it is, if it hasn't moved for long or was asked; else "".
        num_batches: how many it has begun to train on.
    """

    machine: str
    pid: int
    is_inside: bool
    num_beats: int = 0
    place: str = ""
    num_batches: int = 0

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.machine == _machine()


class Bulletin:
    """The board of one attempt of a run: a restart of torchrun's has another.

    A failure is one of this process's so many-th: where all ranks raise and go on, they look for
    the next one together. A rank that went on alone looks for another than those it left.

    Args:
        store: holds what is told; a connection of this object's own.
        rank: this process's.
        world_size: how many there are.
        attempt: its name.

    Attributes:
        is_inside: whether this process does what takes all ranks.
        has_failed: whether an exception has ended what this process did inside.
        num_batches: how many this process has begun to train on.
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

    def post(self, failure: Failure) -> Failure:
        """Posts a failure; returns the one that was posted first, which may be another's."""
        return _failure(self._store.compare_set(self._key("failure"), "", _text(failure)))

    def first_failure(self) -> Failure | None:
        """Returns what was told first; None while all is well."""
        text = self._read(self._key("failure"))
        return None if text is None else _failure(text)

    def claim(self) -> bool:
        """Asks to be the one rank that writes the failure to stderr; returns whether it is."""
        teller = self._store.compare_set(self._key("teller"), "", str(self.rank))
        return teller.decode() == str(self.rank)

    def set_told(self) -> None:
        """Records that the failure has been written to stderr."""
        self._store.set(self._key("told"), "yes")

    def is_told(self) -> bool:
        """Returns whether the failure has been written to stderr."""
        return self._store.check([self._key("told")])

    def replace(self, failure: Failure) -> None:
        """Replaces the report of a failure that this rank posted first."""
        self._store.set(self._key("failure"), _text(failure))

    def enter(self) -> None:
        """Announces that this process now does what takes all ranks."""
        if self.has_failed:
            self.has_failed = False
            self._num_failures += 1
            self.num_batches = self._num_failures << 40  # alike again on all ranks
        self.is_inside = True
        self.beat()

    def leave(self) -> None:
        """Announces that this process is done with that, and may end."""
        self.is_inside = False
        self.beat()

    def beat(self, place: str = "") -> None:
        """Rewrites this rank's record, which shows the others that it runs."""
        with self._beating:  # a watchdog's beat mustn't undo what `leave` has just written
            self._num_beats += 1
            facts = (self.is_inside, self._num_beats, place, self.num_batches)
            member = Member(_machine(), os.getpid(), *facts)
            self._store.set(self._member_key(self.rank), json.dumps(astuple(member)))

    def member(self, rank: int) -> Member | None:
        """Returns a rank's record; None where it has never been inside."""
        text = self._read(self._member_key(rank))
        return None if text is None else Member(*json.loads(text))

    def members(self) -> dict[int, Member | None]:
        """Returns the records of all ranks."""
        return {rank: self.member(rank) for rank in range(self.world_size)}

    def finish(self) -> None:
        """Leaves for good, and counts this rank among those that are done."""
        self.leave()
        self._store.add(f"{self._attempt}/num_done", 1)

    def all_are_done(self) -> bool:
        """Returns whether every rank has finished."""
        return self._store.add(f"{self._attempt}/num_done", 0) == self.world_size

    def part(self) -> None:
        """Lets the store go, when all are done; the rank that may hold it is the last to do so."""
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
    """Returns this process's bulletin; None where it is alone, or where the store can't be reached.

    The variables are torchrun's.
    """
    return _connected(os.getpid()) if in_ranks() else None


def wait_until(condition: Callable[[], bool], seconds: float, *, poll_s: float = 0.02) -> bool:
    """Asks every now and then; returns whether it came true in time."""
    end = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < end:
        time.sleep(poll_s)
    return is_true


@functools.cache
def _connected(_pid: int) -> Bulletin | None:
    """Connects once a process: a fork mustn't share the connection of its parent."""
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
    """Names what a process id is unique in: a machine, or a container of it."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return socket.gethostname()
