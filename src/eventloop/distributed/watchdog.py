"""The watchdog: a thread in each rank that ends the process when another rank has failed.

It polls the bulletin while a method of the trainer runs, at no cost to the loop. A rank that waits
for a failed rank can't be interrupted otherwise.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from eventloop.config.value_sources import TIMEOUT_VARIABLE
from eventloop.distributed.answers import answered_differently, difference
from eventloop.distributed.consistency import DECIDED_ALONE
from eventloop.distributed.late_end import limit_end
from eventloop.distributed.process_ends import (
    details,
    end_process,
    exit_status,
    first_line,
    kill_rank,
    summary,
)
from eventloop.distributed.rank_store import (
    POLL_S,
    Bulletin,
    Failure,
    Member,
    bulletin,
    neighbours,
    timeout_s,
    wait_until,
)
from eventloop.distributed.thread_location import (
    held_up_in_finally,
    line_of_error,
    line_of_thread,
    waits_in_collective,
)
from eventloop.errors import EventloopError, text_of
from eventloop.signals import is_agreed

# How long a rank that has failed may take to close, before it is ended.
CLOSING_S = 6.0
# How long a `finally` may wait for other ranks, and any collective for ranks that have gone on.
_HELD_UP_S = 4.0
_LEFT_ALONE_S = 12.0
# Long enough for a rank with the same error to leave by itself, and for a report to be written;
# with a poll by the rank that notices and one by the others, all are gone within 5 s.
GRACE_S = 2.5
# A rank that hasn't beaten for so long, when it was asked, doesn't run.
_ANSWER_S = 3.0
_POLL_ANSWER_S = 0.2
_POLL_DONE_S = 0.1
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


class NotDoneError(EventloopError):
    """This rank has finished, and another one hasn't within the timeout."""


@contextmanager
def watched_command() -> Iterator[None]:
    """Watches the other ranks while a command runs.

    It waits until all ranks have finished, so that the last one's failure fails the others, too,
    whatever exit status the launcher reports. From then on the process has a few seconds to end.

    Raises:
        EventloopError: the launcher has already ended.
        NotDoneError: another rank hasn't finished in time.
    """
    if (board := bulletin()) is None:
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise EventloopError(
            f"the store of the launcher, at {address}, can't be reached",
            fix="see how torchrun or `eventloop --nproc` ended, and start it again",
        )
    with watched():
        yield
        board.finish()
        seconds = timeout_s()
        if not wait_until(board.all_are_done, seconds, poll_s=_POLL_DONE_S):
            raise NotDoneError(
                f"another rank isn't done {seconds:g} s after this one",
                fix=f"set {TIMEOUT_VARIABLE} to more seconds, if that is how long it takes",
            )
        board.part()
    limit_end(board.label())


@contextmanager
def watched() -> Iterator[None]:
    """Watches the other ranks while a block runs, and reports its exception to them.

    Blocks can be nested: the outermost runs the watchdog.
    """
    board = bulletin()
    is_nested = board is not None and board.is_inside
    if board is None or not _reached(board.enter):
        yield
        return
    with nullcontext() if is_nested else _watchdog(board):
        try:
            yield
        except BaseException as error:
            if not is_agreed(error):
                _reached(functools.partial(post, board, error))
            raise


@contextmanager
def _watchdog(board: Bulletin) -> Iterator[None]:
    over = threading.Event()
    watchdog = _Watchdog(board, over, threading.get_ident())
    threading.Thread(target=watchdog.run, name="eventloop watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        _reached(board.leave)


def _reached(call: Callable[[], object]) -> bool:
    """Calls something that needs the store; returns whether the store was there."""
    try:
        call()
    except RuntimeError:  # it was rank 0's, say, which is gone
        return False
    return True


def post(board: Bulletin, error: BaseException) -> Failure:
    """Posts an exception for the other ranks; returns the failure that was posted first.

    If another rank's end may have caused it, waits for that rank's report. If no rank posts one,
    the ranks are waiting for each other, and the error gets a note with where each one is.
    """
    board.has_failed = True
    is_lost = _lost_another(error)
    if is_lost and not wait_until(lambda: board.first_failure() is not None, GRACE_S):
        _ask_around(board, error)
    own = _failure(board, error)
    first = board.post(own)
    # This rank's watchdog may have posted something before its thread lost another rank.
    is_own = first.reported_by == board.rank and first.line == own.line
    notes = [note for note in getattr(error, "__notes__", []) if note]
    is_noted = any(first.line in note or first.line.startswith(note) for note in notes)
    if is_lost and not is_own and not is_noted:
        error.add_note(f"what came first: {first.line}")
    return first


def _ask_around(board: Bulletin, error: BaseException) -> None:
    """Asks all ranks where they are, and posts the rank that the others wait for."""
    before = board.members()
    if (question := board.difference()) is not None:
        different = answered_differently(question, board.answers, board.layout)
        error.add_note(text_of(different))
        board.post(_failure(board, different))
        return
    own = _failure(board, error)
    if board.post(own).reported_by != board.rank:
        return

    del before[board.rank]
    after = dict(before)

    def have_answered() -> bool:
        after.update({rank: board.member(rank) for rank in after})
        return all(one != before[rank] and one and one.line for rank, one in after.items())

    wait_until(have_answered, _ANSWER_S, poll_s=_POLL_ANSWER_S)
    found = {rank: _doing(before[rank], one) for rank, one in after.items()}
    blamed, doing = _hung(found, board.label)
    line = f"{doing}; rank {board.label()} waits {line_of_error(error)}"
    error.add_note(line)
    board.replace(replace(own, rank=blamed, line=f"{line}: {summary(error)}"))
    for rank, member in after.items():
        if not found[rank].runs and member is not None and member.is_here:
            kill_rank(member.pid, rank)


class _Doing(NamedTuple):
    """What a rank is doing: whether its process runs, and a description."""

    runs: bool
    text: str


def _doing(before: Member | None, after: Member | None) -> _Doing:
    """Returns what a rank is doing, from its records before and after it was asked."""
    if after is None:
        return _Doing(True, "hasn't started")
    if after == before and after.is_inside:
        why = f"process {after.pid} is stopped, or in a call that holds the GIL"
        return _Doing(False, f"doesn't run: {why}")
    return _Doing(True, f"hangs {after.line}" if after.line else "has left")


def _hung(found: dict[int, _Doing], label: Callable[[int], str]) -> tuple[int, str]:
    """Returns the rank that most likely hangs, and what the others do.

    A rank that doesn't run comes first, then ranks that aren't where most ranks are.
    """
    ranks: dict[_Doing, list[int]] = {}
    for rank, doing in found.items():
        ranks.setdefault(doing, []).append(rank)
    order = sorted(ranks.items(), key=lambda item: (item[0].runs, len(item[1])))
    listed = (
        f"{'ranks' if len(who) > 1 else 'rank'} {', '.join(map(label, who))}: {doing.text}"
        for doing, who in order
    )
    return order[0][1][0], "; ".join(listed)


def _failure(board: Bulletin, error: BaseException) -> Failure:
    line = first_line(error, board.label())
    lines = details(error)
    return Failure(board.rank, line, lines, exit_status(error), reported_by=board.rank)


def _lost_another(error: BaseException) -> bool:
    """Returns whether another rank's end may have caused an exception."""
    import torch.distributed as dist

    cause = error.__cause__ or error
    text = text_of(error)
    is_gone = isinstance(error, RuntimeError) and any(word in text for word in _LOST)
    return isinstance(cause, (dist.DistError, NotDoneError)) or is_gone


class _Watchdog:
    """The work of the thread, until `over` is set: the block of the thread `watched` was left."""

    def __init__(self, board: Bulletin, over: threading.Event, watched: int) -> None:
        self._board = board
        self._over = over
        self._watched = watched
        self._neighbours = neighbours(board)
        self._position: tuple[int, int] | None = None
        self._moved_at = time.monotonic()
        self._failure: Failure | None = None
        self._ends_at = math.inf

    def run(self) -> None:
        """Watches until the block is left; ends the process if a rank has failed."""
        try:
            while not self._over.wait(POLL_S):
                self._look()
        except RuntimeError:  # the connection to the store is lost
            self._end_without_store()

    def _look(self) -> None:
        board = self._board
        board.beat(self._line())
        self._post_what_is_held_up()
        self._post_what_no_rank_joins()
        lost = [found for one in self._neighbours if (found := one.look())]
        self._post_different_answers()
        if self._failure is None:
            if lost:  # before it is posted: the watched thread may then end this process
                self._end_neighbours()
            self._failure = board.first_failure() or (board.post(lost[0]) if lost else None)
            if self._failure is not None:
                # One that has failed itself may close what it has open, but waits for no other.
                grace_s = CLOSING_S if board.has_failed else GRACE_S
                self._ends_at = time.monotonic() + grace_s
        elif time.monotonic() > self._ends_at:
            self._end(self._failure)

    def _post_what_is_held_up(self) -> None:
        """Posts an exception that is held by a `finally` block which waits for other ranks."""
        if self._board.has_failed or time.monotonic() - self._moved_at < _HELD_UP_S:
            return
        if (error := held_up_in_finally(self._watched)) is not None:
            self._failure = post(self._board, error)
            self._ends_at = time.monotonic()

    def _post_what_no_rank_joins(self) -> None:
        """Posts that this rank waits in a collective while the others have begun later batches.

        Only the rank whose ring neighbour is ahead reads all records.
        """
        board = self._board
        following = board.member((board.rank + 1) % board.world_size) if self._waits() else None
        if following is None or following.num_batches <= board.num_batches:
            return
        others = [one for rank, one in board.members().items() if rank != board.rank]
        at = [(one.num_batches, bool(one.line)) if one else (-1, True) for one in others]
        if all(found > (board.num_batches, False) for found in at):
            error = EventloopError(
                f"waits {line_of_thread(self._watched)} after {board.num_batches} batches for ranks "
                f"that have begun a later one, up to {max(at)[0]}",
                fix=DECIDED_ALONE,
            )
            board.post(_failure(board, error))

    def _post_different_answers(self) -> None:
        """Posts a question of the loop that this rank and a neighbour have answered differently.

        They have computed different things since, or wait for each other in different collectives.
        """
        board = self._board
        if self._failure is not None or not board.is_inside:
            return
        texts = {board.rank: str(board.answers)}
        for neighbour in self._neighbours:
            texts |= neighbour.answers
        if difference(texts) is not None and (found := board.difference()) is not None:
            error = answered_differently(found, board.answers, board.layout)
            board.post(_failure(board, error))

    def _waits(self) -> bool:
        """Returns whether the thread has been in a collective for long."""
        is_still = time.monotonic() - self._moved_at > _LEFT_ALONE_S
        return is_still and waits_in_collective(self._watched)

    def _line(self) -> str:
        """Returns where the watched thread is, if it has been there for long or a rank has failed.

        It is posted before a timeout ends the process in C++. Reads one frame, without stopping
        the thread.
        """
        frame = sys._current_frames().get(self._watched)
        position = None if frame is None else (id(frame), frame.f_lasti)
        if position != self._position:
            self._position = position
            self._moved_at = time.monotonic()
        is_stuck = time.monotonic() - self._moved_at > _STUCK_FRAC * timeout_s()
        is_stuck = is_stuck or self._failure is not None or self._waits()
        return line_of_thread(self._watched) if is_stuck else ""

    def _end(self, failure: Failure) -> None:
        """Ends the process, and neighbours that can't end themselves, once the failure is reported."""
        board = self._board
        if board.claim():
            tell((board.first_failure() or failure).report)
            board.set_reported()
        self._end_neighbours()
        if not self._over.is_set():
            end_process(failure.status)

    def _end_neighbours(self) -> None:
        for one in self._neighbours:
            one.end_if_still()

    def _end_without_store(self) -> None:
        if not self._over.wait(GRACE_S):
            line = f"rank {self._board.label()}: the process that held the ranks' store is gone"
            tell(f"{line}: the launcher, or rank 0\n")
            end_process(1)


def tell(report: str) -> None:
    """Writes lines to stderr, bypassing `sys.stderr` and its locks."""
    os.write(2, report.encode(errors="backslashreplace"))
