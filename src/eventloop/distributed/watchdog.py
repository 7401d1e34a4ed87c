"""The watchdog: a thread in each rank that ends the process when another rank has failed.

It polls the bulletin while a method of the trainer runs, at no cost to the loop. It has to end the
process because a rank that waits in a collective for a failed rank can't be interrupted.
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

# How long a rank that has failed may take to run its `close` hooks before it is killed.
CLOSING_S = 6.0
# How long a `finally` block may wait in a collective before the exception it holds is reported.
_HELD_UP_S = 4.0
# How long a rank may wait in a collective while all others have begun later batches.
_LEFT_BEHIND_S = 12.0
# Long enough for a rank with the same error to exit normally, and for a report to be written. Together
# with one poll by the rank that notices and one by the others, all processes end within 5 s.
GRACE_S = 2.5
# A rank without a heartbeat for this long, after the ranks were asked for their positions, doesn't run.
_ANSWER_S = 3.0
_POLL_ANSWER_S = 0.2
_POLL_DONE_S = 0.1
# Fraction of the timeout after which a rank that hasn't moved publishes its position: at the timeout
# torch ends the process in C++, and nothing can be published any more.
_STUCK_FRAC = 0.5
# Texts in errors of gloo and NCCL that follow from the loss of another rank.
_LOST_RANK_TEXTS = (
    "gloo",
    "NCCL",
    "Application timeout",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Socket",
)


class NotDoneError(EventloopError):
    """This rank has finished, but another rank hasn't within the timeout."""


@contextmanager
def watched_command() -> Iterator[None]:
    """Watches the other ranks while a command runs, and waits until all ranks have finished.

    So a failure of the slowest rank also fails the ranks that finished before it, whichever exit
    status the launcher reports. Afterwards the process has a few seconds to exit.

    Raises:
        EventloopError: the launcher's store can't be reached, as the launcher has ended.
        NotDoneError: another rank hasn't finished within the timeout.
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
                f"another rank hasn't finished {seconds:g} s after this rank",
                fix=f"set {TIMEOUT_VARIABLE} to more seconds, if the other rank needs longer",
            )
        board.part()
    limit_end(board.label())


@contextmanager
def watched() -> Iterator[None]:
    """Watches the other ranks while a block runs, and reports the block's exception to them.

    Blocks can be nested: only the outermost starts a watchdog.
    """
    board = bulletin()
    is_nested = board is not None and board.is_inside
    if board is None or not _reaches_store(board.enter):
        yield
        return
    with nullcontext() if is_nested else _watchdog(board):
        try:
            yield
        except BaseException as error:
            if not is_agreed(error):
                _reaches_store(functools.partial(post, board, error))
            raise


@contextmanager
def _watchdog(board: Bulletin) -> Iterator[None]:
    left_block = threading.Event()
    watchdog = _Watchdog(board, left_block, threading.get_ident())
    threading.Thread(target=watchdog.run, name="eventloop watchdog", daemon=True).start()
    try:
        yield
    finally:
        left_block.set()
        _reaches_store(board.leave)


def _reaches_store(call: Callable[[], object]) -> bool:
    """Calls a function that uses the store; returns whether the store could be reached."""
    try:
        call()
    except RuntimeError:  # the process that hosts the store, such as rank 0, is gone
        return False
    return True


def post(board: Bulletin, error: BaseException) -> Failure:
    """Posts an exception for the other ranks; returns the failure that was posted first.

    If the loss of another rank may have caused the exception, waits for that rank's report. If no
    rank posts a report, the ranks are waiting for each other, and the error gets a note with the
    position of every rank.
    """
    board.has_failed = True
    is_lost = _lost_another(error)
    if is_lost and not wait_until(lambda: board.first_failure() is not None, GRACE_S):
        _ask_around(board, error)
    failure = _failure(board, error)
    first_failure = board.post(failure)
    # The reporting rank isn't enough to recognize this failure: this rank's watchdog may have posted
    # another failure before the watched thread raised.
    is_first = first_failure.reported_by == board.rank and first_failure.line == failure.line
    notes = [note for note in getattr(error, "__notes__", []) if note]
    first_line_text = first_failure.line
    is_noted = any(first_line_text in note or first_line_text.startswith(note) for note in notes)
    if is_lost and not is_first and not is_noted:
        error.add_note(f"first failure: {first_line_text}")
    return first_failure


def _ask_around(board: Bulletin, error: BaseException) -> None:
    """Asks all ranks for their positions, and posts the rank that the others wait for."""
    old_records = board.members()
    if (question := board.difference()) is not None:
        different = answered_differently(question, board.answers, board.layout)
        error.add_note(text_of(different))
        board.post(_failure(board, different))
        return
    # Posting is the request: a watchdog that sees a failure publishes its rank's position.
    failure = _failure(board, error)
    if board.post(failure).reported_by != board.rank:
        return

    del old_records[board.rank]
    new_records = dict(old_records)

    def have_answered() -> bool:
        new_records.update({rank: board.member(rank) for rank in new_records})
        for rank, member in new_records.items():
            if member is None or member == old_records[rank] or not member.line:
                return False
        return True

    wait_until(have_answered, _ANSWER_S, poll_s=_POLL_ANSWER_S)
    activities = {
        rank: _activity(old_records[rank], member) for rank, member in new_records.items()
    }
    blamed_rank, description = _hung(activities, board.label)
    line = f"{description}; rank {board.label()} waits {line_of_error(error)}"
    error.add_note(line)
    board.replace(replace(failure, rank=blamed_rank, line=f"{line}: {summary(error)}"))
    for rank, member in new_records.items():
        if not activities[rank].runs and member is not None and member.is_here:
            kill_rank(member.pid, rank)


class _Activity(NamedTuple):
    """The activity of a rank: whether its process runs, and a description."""

    runs: bool
    text: str


def _activity(old_record: Member | None, new_record: Member | None) -> _Activity:
    """Returns the activity of a rank, from its records before and after it was asked."""
    if new_record is None:
        return _Activity(True, "hasn't started")
    if new_record == old_record and new_record.is_inside:
        reason = f"process {new_record.pid} is stopped, or in a call that holds the GIL"
        return _Activity(False, f"doesn't run: {reason}")
    return _Activity(True, f"hangs {new_record.line}" if new_record.line else "has left")


def _hung(activities: dict[int, _Activity], label: Callable[[int], str]) -> tuple[int, str]:
    """Returns the rank that most likely hangs, and a description of all activities.

    A rank that doesn't run is the most suspicious, then a rank whose activity few ranks share.
    """
    ranks_by_activity: dict[_Activity, list[int]] = {}
    for rank, activity in activities.items():
        ranks_by_activity.setdefault(activity, []).append(rank)
    most_suspicious_first = sorted(
        ranks_by_activity.items(), key=lambda pair: (pair[0].runs, len(pair[1]))
    )
    descriptions = []
    for activity, ranks in most_suspicious_first:
        noun = "ranks" if len(ranks) > 1 else "rank"
        descriptions.append(f"{noun} {', '.join(map(label, ranks))}: {activity.text}")
    _, suspects = most_suspicious_first[0]
    return suspects[0], "; ".join(descriptions)


def _failure(board: Bulletin, error: BaseException) -> Failure:
    line = first_line(error, board.label())
    lines = details(error)
    return Failure(board.rank, line, lines, exit_status(error), reported_by=board.rank)


def _lost_another(error: BaseException) -> bool:
    """Returns whether the loss of another rank may have caused an exception."""
    import torch.distributed as dist

    cause = error.__cause__ or error
    text = text_of(error)
    is_gone = isinstance(error, RuntimeError) and any(word in text for word in _LOST_RANK_TEXTS)
    return isinstance(cause, (dist.DistError, NotDoneError)) or is_gone


class _Watchdog:
    """The loop of the watchdog thread.

    Args:
        left_block: set when the watched block is left, which ends the loop.
        watched: `threading.get_ident()` of the thread that runs the block.
    """

    def __init__(self, board: Bulletin, left_block: threading.Event, watched: int) -> None:
        self._board = board
        self._left_block = left_block
        self._watched = watched
        self._neighbours = neighbours(board)
        self._position: tuple[int, int] | None = None
        self._moved_at = time.monotonic()
        self._failure: Failure | None = None
        self._ends_at = math.inf

    def run(self) -> None:
        """Watches until the block is left; ends the process if a rank has failed."""
        try:
            while not self._left_block.wait(POLL_S):
                self._look()
        except RuntimeError:  # the connection to the store is lost
            self._end_without_store()

    def _look(self) -> None:
        board = self._board
        board.beat(self._line())
        self._post_held_up_exception()
        self._post_abandoned_collective()
        lost_ranks = []
        for neighbour in self._neighbours:
            if (failure := neighbour.look()) is not None:
                lost_ranks.append(failure)
        self._post_different_answers()
        if self._failure is None:
            if (
                lost_ranks
            ):  # before posting: the watched thread may end this process once it is posted
                self._end_neighbours()
            self._failure = board.first_failure()
            if self._failure is None and lost_ranks:
                self._failure = board.post(lost_ranks[0])
            if self._failure is not None:
                # A rank that has failed itself gets time for its `close` hooks.
                grace_s = CLOSING_S if board.has_failed else GRACE_S
                self._ends_at = time.monotonic() + grace_s
        elif time.monotonic() > self._ends_at:
            self._end(self._failure)

    def _post_held_up_exception(self) -> None:
        """Posts an exception that can't propagate, as a `finally` block waits for other ranks."""
        if self._board.has_failed or time.monotonic() - self._moved_at < _HELD_UP_S:
            return
        if (error := held_up_in_finally(self._watched)) is not None:
            self._failure = post(self._board, error)
            self._ends_at = time.monotonic()

    def _post_abandoned_collective(self) -> None:
        """Posts that this rank waits in a collective that the other ranks have passed.

        They have begun later batches, or are at this batch and stuck, too.
        """
        if not self._waits():
            return
        board = self._board
        # One neighbour is read first: reading the records of all ranks would load the store.
        next_in_ring = board.member((board.rank + 1) % board.world_size)
        if next_in_ring is None or next_in_ring.num_batches <= board.num_batches:
            return
        latest_batch = 0
        for rank, member in board.members().items():
            if rank == board.rank:
                continue
            if member is None or member.num_batches < board.num_batches:
                return
            if member.num_batches == board.num_batches and not member.line:
                return  # it is still working on this batch
            latest_batch = max(latest_batch, member.num_batches)
        error = EventloopError(
            f"waits {line_of_thread(self._watched)} after {board.num_batches} batches for ranks "
            f"that have begun a later batch, up to {latest_batch}",
            fix=DECIDED_ALONE,
        )
        board.post(_failure(board, error))

    def _post_different_answers(self) -> None:
        """Posts a question of the loop that this rank and a neighbour have answered differently.

        Since then they have computed different values, or wait for each other in different collectives.
        """
        board = self._board
        if self._failure is not None or not board.is_inside:
            return
        texts = {board.rank: str(board.answers)}
        for neighbour in self._neighbours:
            texts |= neighbour.answers
        if difference(texts) is None:
            return
        # A neighbour differs, so reading the records of all ranks is worth it.
        if (difference_of_all := board.difference()) is not None:
            error = answered_differently(difference_of_all, board.answers, board.layout)
            board.post(_failure(board, error))

    def _waits(self) -> bool:
        """Returns whether the watched thread has been in a collective for `_LEFT_BEHIND_S`."""
        is_still = time.monotonic() - self._moved_at > _LEFT_BEHIND_S
        return is_still and waits_in_collective(self._watched)

    def _line(self) -> str:
        """Returns the position of the watched thread, if it is stuck or a rank has failed; else "".

        Reads a single frame, without stopping the thread.
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
        """Reports the failure, then ends neighbours that can't end themselves, and this process."""
        board = self._board
        if board.claim():  # a single rank writes the report
            tell((board.first_failure() or failure).report)
            board.set_reported()
        self._end_neighbours()
        if not self._left_block.is_set():
            end_process(failure.status)

    def _end_neighbours(self) -> None:
        for neighbour in self._neighbours:
            neighbour.end_if_still()

    def _end_without_store(self) -> None:
        if not self._left_block.wait(GRACE_S):
            line = f"rank {self._board.label()}: the process that held the ranks' store is gone"
            tell(f"{line}: the launcher, or rank 0\n")
            end_process(1)


def tell(report: str) -> None:
    """Writes lines to stderr, bypassing `sys.stderr` and its locks."""
    os.write(2, report.encode(errors="backslashreplace"))
