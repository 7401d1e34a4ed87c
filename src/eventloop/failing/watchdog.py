"""The watchdog: a thread of each rank that ends it when another rank has failed.

It looks at the bulletin now and then while a method of the trainer is under way, and costs the
loop nothing. A rank that waits for one that has failed can't be woken in any other way.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eventloop.failing.bulletin import Bulletin, Failure, bulletin, wait_until
from eventloop.failing.ending import end_process
from eventloop.failing.reports import details, exit_status, first_line
from eventloop.failing.timeout import timeout_s
from eventloop.failing.whereabouts import place_of_error, place_of_thread

POLL_S = 0.5
# Long enough for a rank with the same error to leave by itself, and for a report to be written;
# with a poll by the rank that notices and one by the others, all are gone within 5 s.
GRACE_S = 2.5
_PLACES_S = 2 * POLL_S
# Of the timeout; a rank that hasn't moved for so long tells where it is while it can.
_STUCK_FRAC = 0.5
_LOST = (
    "gloo",
    "NCCL",
    "Application timeout",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Socket",
)


@contextmanager
def watched() -> Iterator[None]:
    """Watches over the other ranks while a block runs, and tells them if it raises."""
    board = bulletin()
    if board is None or board.is_inside or not _reached(board.enter):
        yield
        return
    over = threading.Event()
    watchdog = _Watchdog(board, over, threading.get_ident())
    threading.Thread(target=watchdog.run, name="eventloop watchdog", daemon=True).start()
    try:
        yield
    except BaseException as error:
        _reached(functools.partial(post, board, error))
        raise
    finally:
        over.set()
        _reached(board.leave)


def _reached(call: Callable[[], object]) -> bool:
    """Makes a call that needs the store; tells whether that is there."""
    try:
        call()
    except RuntimeError:  # it was rank 0's, say, which is gone
        return False
    return True


def post(board: Bulletin, error: BaseException) -> Failure:
    """Tells the other ranks of an exception; gives the failure that was told first.

    What another rank's end has caused isn't the first: it is waited for. Where nobody tells of
    anything, ranks have waited for each other, and the error gets a note of where each one is.
    """
    is_lost = _lost_another(error)
    if is_lost and not wait_until(lambda: board.first_failure() is not None, GRACE_S):
        _ask_around(board, error)
    first = board.post(_failure(board, error))
    note = f"what came first: {first.line}"
    if is_lost and first.rank != board.rank and note not in getattr(error, "__notes__", []):
        error.add_note(note)
    return first


def _ask_around(board: Bulletin, error: BaseException) -> None:
    """Has all ranks tell where they are, and notes it on an exception."""
    first = board.post(_failure(board, error))
    if first.rank != board.rank:
        return
    board.put_place(place_of_error(error))
    wait_until(lambda: len(board.places()) == board.world_size, _PLACES_S)
    error.__notes__ = [_places(board), *getattr(error, "__notes__", [])]
    board.replace(_failure(board, error))


def _places(board: Bulletin) -> str:
    """Lists the ranks by where they are; this one last, which waits for the others."""
    ranks: dict[str, list[int]] = {}
    for rank, place in board.places().items():
        ranks.setdefault(place, []).append(rank)
    # Whoever isn't where the others are is to blame, most likely.
    places = sorted(ranks.items(), key=lambda item: (board.rank in item[1], len(item[1])))
    return "; ".join(
        f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))} {place}"
        for place, found in places
    )


def _failure(board: Bulletin, error: BaseException) -> Failure:
    return Failure(board.rank, first_line(error), details(error), exit_status(error))


def _lost_another(error: BaseException) -> bool:
    """Tells whether an exception may have come of another rank's end."""
    import torch.distributed as dist

    text = str(error)
    is_gone = isinstance(error, RuntimeError) and any(word in text for word in _LOST)
    return isinstance(error, dist.DistError) or is_gone


class _Watchdog:
    """What the thread does.

    Args:
        board: where failures are told.
        over: set when the block is left.
        watched: the thread that runs it.
    """

    def __init__(self, board: Bulletin, over: threading.Event, watched: int) -> None:
        self._board = board
        self._over = over
        self._watched = watched
        self._neighbour = _neighbour(board.rank)
        self._position: tuple[int, int] | None = None
        self._moved_at = time.monotonic()
        self._is_stuck = False

    def run(self) -> None:
        """Looks around until the block is left; ends the process if a rank has failed."""
        while not self._over.wait(POLL_S):
            try:
                self._tell_if_stuck()
                failure = self._board.first_failure() or self._lost_neighbour()
                if failure is not None:
                    if failure.rank != self._board.rank:
                        self._end(failure)
                    return  # this rank's own: it is on its way out
            except RuntimeError:  # the connection to the store is lost
                self._end_without_store()
                return

    def _tell_if_stuck(self) -> None:
        """Tells where the watched thread waits, before a timeout ends the process in C++.

        A glance at one frame, without a stop of the thread.
        """
        frame = sys._current_frames().get(self._watched)
        position = None if frame is None else (id(frame), frame.f_lasti)
        if position != self._position:
            self._position, self._moved_at = position, time.monotonic()
            if self._is_stuck:
                self._is_stuck = False
                self._board.put_place("")
        elif not self._is_stuck and time.monotonic() - self._moved_at > _STUCK_FRAC * timeout_s():
            self._is_stuck = True
            self._board.put_place(place_of_thread(self._watched))

    def _lost_neighbour(self) -> Failure | None:
        """Looks after one rank, which may have ended without a word; posts it if it has."""
        rank, board = self._neighbour, self._board
        found = None if rank is None else board.process_of(rank)
        if rank is None or found is None or _is_alive(found.pid):
            return None
        found = board.process_of(rank)
        if found is None or not found.is_inside:
            return None  # it left in order, just now or long ago
        what = f"rank {rank}: its process {found.pid} is gone without a word"
        places = _places(board)
        stuck = f"; before that: {places}" if places else ""
        return board.post(Failure(rank, f"{what}{stuck}"))

    def _end(self, failure: Failure) -> None:
        """Ends the process, unless it leaves by itself, and sees that the failure is told."""
        board = self._board
        board.put_place(place_of_thread(self._watched))
        if self._over.wait(GRACE_S):
            return
        if board.claim():
            tell((board.first_failure() or failure).report)
            board.set_told()
        if not self._over.is_set():
            end_process(failure.status)

    def _end_without_store(self) -> None:
        if not self._over.wait(GRACE_S):
            line = f"rank {self._board.rank}: the process that held the ranks' store is gone"
            tell(f"{line}: the launcher, or rank 0\n")
            end_process(1)


def tell(report: str) -> None:
    """Writes lines to stderr, whatever has taken the place of `sys.stderr` and its locks."""
    os.write(2, report.encode(errors="backslashreplace"))


def _neighbour(rank: int) -> int | None:
    """Gives the next rank on this machine, in a ring; None without one, or on old systems."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_here == 1 or not hasattr(os, "pidfd_open"):
        return None
    return rank - local_rank + (local_rank + 1) % num_here


def _is_alive(pid: int) -> bool:
    """Tells whether a process runs; one that ended and that nobody has asked for doesn't."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # not allowed here
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(descriptor)
