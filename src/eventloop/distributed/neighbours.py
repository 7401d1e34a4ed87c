"""The ranks that a rank watches: whether their processes exist and run.

There is a ring on each machine and one over all ranks, so each rank reads at most two records,
independent of the number of ranks.
"""

from __future__ import annotations

import os
import select
import time

from eventloop.distributed.exit import kill_rank, timeout_s
from eventloop.distributed.failure_store import Bulletin, Failure, Member, wait_until

POLL_S = 0.5
_STILL_S = 4 * POLL_S  # without a heartbeat: it can't end by itself


def neighbours(board: Bulletin) -> list[Neighbour]:
    """Returns the neighbours of this process's rank."""
    rank, world_size = board.rank, board.world_size
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    next_here = rank - local_rank + (local_rank + 1) % num_here
    return [Neighbour(board, one) for one in {next_here, (rank + 1) % world_size} - {rank}]


class Neighbour:
    """A rank that is watched.

    Args:
        board: has its record.
        rank: of the neighbour.
    """

    def __init__(self, board: Bulletin, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._member: Member | None = None
        self._still_s = 0.0
        self._looked_at = time.monotonic()

    def look(self) -> Failure | None:
        """Reads its record; returns a failure if it has ended, or hasn't run for the timeout."""
        member, previous = self._board.member(self._rank), self._member
        now, looked_at = time.monotonic(), self._looked_at
        self._member, self._looked_at = member, now
        # While this process was stopped itself, its neighbour may have been, too.
        self._still_s = (
            self._still_s + min(now - looked_at, 2 * POLL_S) if member == previous else 0
        )
        if member is None or not member.is_inside:
            return None
        if member.is_here and not _is_alive(member.pid):
            return self._gone(member)
        if self._still_s > timeout_s():
            what = f"its process {member.pid} hasn't run for {self._still_s:.0f} s"
            why = "it is stopped, or in a call that holds the GIL"
            return self._failure(f"{what}: {why}")
        return None

    def end_if_still(self) -> None:
        """Kills the rank and its children if it can't exit by itself."""
        member = self._member
        if member is None or not (member.is_inside and member.is_here):
            return
        if self._still_s < _STILL_S or wait_until(
            lambda: self._board.member(self._rank) != member, POLL_S
        ):
            return
        kill_rank(member.pid)

    def _gone(self, seen: Member) -> Failure | None:
        member = self._board.member(self._rank)
        if member is None or not member.is_inside:
            return None  # it left in order, between the two looks
        members = self._board.members()
        places = [f"rank {rank} {one.line}" for rank, one in members.items() if one and one.line]
        before = f"; before that: {'; '.join(places)}" if places else ""
        what = f"its process {seen.pid} is gone without a word"
        return self._failure(f"{what}{before}")

    def _failure(self, what: str) -> Failure:
        return Failure(self._rank, f"rank {self._rank}: {what}", reported_by=self._board.rank)


def _is_alive(pid: int) -> bool:
    """Returns whether a process is running; a zombie isn't."""
    if not hasattr(os, "pidfd_open"):
        return _is_listed(pid)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # not allowed here
        return _is_listed(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)


def _is_listed(pid: int) -> bool:
    """Returns whether a process exists; a zombie does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
