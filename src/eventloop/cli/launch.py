"""`--nproc`: starts the command once per rank, like torchrun, and forwards signals to all.

Torch's launcher isn't used because it doesn't forward SIGUSR1, doesn't wait while a checkpoint is
saved, doesn't handle a second Ctrl-C, and reports failures before the ranks can (torch 2.13).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from eventloop.cli.arguments import CommandOption
from eventloop.distributed.process_ends import FAILURE, in_ranks, kill_group, members_of_group
from eventloop.errors import UsageError, counted
from eventloop.naming import fold
from eventloop.safe_text import one_line

if TYPE_CHECKING:
    from eventloop.distributed.rank_store import Bulletin

_POLL_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_PASSED = (*_STOPPING, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_STOPPED = (130, 143)
_KILLED_S = 8.0  # after a failure, or a good end; more than a rank needs to exit
# For processes that a rank has left behind: the time to exit unasked, and after SIGTERM.
_LEAVING_S = 1.0
_LEFT_S = 2.0
NPROC = CommandOption("nproc", "N", "train in N processes on this machine, as torchrun would")


def launch(command: str, argv: Sequence[str], num: int) -> int:
    """Runs a command in several processes and waits for them.

    Args:
        command: the name of the command.
        argv: the arguments after the name, including `--nproc`.
        num: the number of processes.

    Returns:
        The exit status of the first process that failed; 128 plus the signal's number.

    Raises:
        UsageError: torchrun has started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or in_ranks():
        raise UsageError(
            f"--nproc {num}, but torchrun has started this process as one of "
            f"{os.environ.get('WORLD_SIZE', 'several')} already",
            fix="leave --nproc out, or start it without torchrun",
        )
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if num > num_cores:
        sys.stderr.write(f"warning: {num} processes share {counted(num_cores, 'core')}\n")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num)))
    # -P keeps the working directory off the import path, as in the command `eventloop`.
    return _run(num, ["-P", "-m", "eventloop", command, *without_nproc(argv)])


def without_nproc(argv: Sequence[str]) -> list[str]:
    """Removes `--nproc N` from a command line."""
    remaining: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--") and fold(name[2:]) == NPROC.name:
            if not equals:
                next(words)
        else:
            remaining.append(word)
    return remaining


def _run(num: int, arguments: list[str]) -> int:
    from eventloop.distributed import rank_variables
    from eventloop.distributed.loopback import loopback_store
    from eventloop.distributed.rank_store import Bulletin
    from eventloop.distributed.sealed_records import new_token

    # The store is in this process, so that it outlives every rank.
    store = loopback_store()
    token = new_token()
    command = [sys.executable, *arguments]
    bulletin = Bulletin(store, -1, num, "0", token)
    ranks = _Ranks(bulletin)
    with ranks.passing_signals_on():
        for rank in range(num):
            ranks.start(command, rank_variables(rank, num, store.port, token))
        ranks.wait()
    return _reported_status(ranks, bulletin)


def _reported_status(ranks: _Ranks, bulletin: Bulletin) -> int:
    """Prints how the rank that failed first has ended; returns its exit status."""
    if ranks.first is None:
        return 0
    if (failure := bulletin.first_failure()) is not None and not bulletin.is_reported():
        sys.stderr.write(failure.report)
    rank = ranks.first if failure is None else failure.rank
    process = ranks.processes[rank]
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if status == 0 or rank in ranks.killed:
        status = failure.status if failure is not None else FAILURE
    if ranks.asked_to_stop:
        return status if status in _STOPPED else 128 + ranks.received[0]
    if status in _STOPPED:
        return status
    if rank in ranks.late:
        sys.stderr.write(
            f"rank {rank}: its process {process.pid} hadn't ended {_KILLED_S:g} s after the run, and was "
            "killed: the interpreter hung while it exited, for example in a `__del__`\n"
        )
        return status
    outcome = f"ended with status {process.returncode}"
    if not process.returncode:
        outcome = "ended with status 0, but wasn't done"
    if process.returncode < 0:
        outcome = f"was ended by {signal.Signals(-process.returncode).name}"
    others_note = (
        "; the others were stopped"
        if any(process.returncode for process in ranks.others(rank))
        else ""
    )
    sys.stderr.write(f"rank {rank} {outcome} (process {process.pid}){others_note}\n")
    return status


class _Ranks:
    """The processes of all ranks.

    Attributes:
        processes: the processes, in order of rank.
        received: the numbers of the received signals, in order.
        first: the rank that failed first.
        killed: the ranks that had to be killed.
        late: the ranks that hadn't exited long after the end of a successful run.
    """

    def __init__(self, bulletin: Bulletin) -> None:
        self._bulletin = bulletin
        self.killed: set[int] = set()
        self.late: set[int] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: list[int] = []
        self.first: int | None = None

    @property
    def asked_to_stop(self) -> bool:
        """Whether SIGINT or SIGTERM was received."""
        return any(number in _STOPPING for number in self.received)

    def others(self, rank: int) -> list[subprocess.Popen[bytes]]:
        """Returns the processes of all other ranks."""
        return [process for idx, process in enumerate(self.processes) if idx != rank]

    def start(self, command: list[str], variables: dict[str, str]) -> None:
        """Starts a rank in its own session, so that only this process forwards Ctrl-C to it."""
        process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
        self.processes.append(process)

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Forwards this process's signals to the ranks."""
        previous = {number: signal.signal(number, self._pass_on) for number in _PASSED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Waits for all ranks.

        After a rank has failed, the others exit; after `_KILLED_S`, remaining processes are killed,
        including workers. Ranks that were asked to stop have unlimited time, to save a checkpoint.
        After all ranks have finished, they have the same time to exit as after a failure.
        """
        hurries_since = done_since = math.inf
        while any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_S)
            current_time = time.monotonic()
            if self._has_failed() or self.received.count(signal.SIGINT) > 1:
                hurries_since = min(hurries_since, current_time)
            if done_since == math.inf and self._bulletin.all_are_done():
                done_since = current_time
            if current_time - hurries_since > _KILLED_S:
                self._kill()
            elif current_time - done_since > _KILLED_S:
                self.late |= {
                    idx for idx, process in enumerate(self.processes) if process.poll() is None
                }
                self._kill()
        if self._has_failed():
            self._kill()
        self._end_what_is_left()

    def _has_failed(self) -> bool:
        """Returns whether a rank has failed; records the first that did."""
        failed = [
            idx
            for idx, process in enumerate(self.processes)
            if self._is_failed(idx, process.poll())
        ]
        if failed and self.first is None:
            self.first = failed[0]
        is_requested = self.asked_to_stop or all(
            self.processes[idx].returncode in _STOPPED for idx in failed
        )
        return bool(failed) and not is_requested

    def _is_failed(self, rank: int, status: int | None) -> bool:
        """Returns whether a rank has failed.

        A rank also fails if it exits with status 0 without having reported its end. A single process
        doesn't report.
        """
        if status == 0 and len(self.processes) > 1:
            member = self._bulletin.member(rank)
            return member is None or member.is_inside
        return bool(status)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        # One rank's request for a checkpoint is shared with all.
        for process in self.processes if number in _STOPPING else self.processes[:1]:
            process.send_signal(number)

    def _end_what_is_left(self) -> None:
        """Ends processes that ranks have left behind, and prints their names."""
        if not self._wait_for_groups(_LEAVING_S):
            for rank, process in enumerate(self.processes):
                if members := members_of_group(process.pid):
                    names = ", ".join(f"{one_line(name)} ({pid})" for pid, name in members.items())
                    sys.stderr.write(f"rank {rank} has left processes behind, now ended: {names}\n")
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGTERM)
            if not self._wait_for_groups(_LEFT_S):
                for process in self.processes:
                    kill_group(process.pid)

    def _wait_for_groups(self, seconds: float) -> bool:
        """Waits until the ranks' sessions are empty; returns False after `seconds`."""
        end = time.monotonic() + seconds
        while any(members_of_group(process.pid) for process in self.processes):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def _kill(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.killed.add(rank)
            kill_group(process.pid)
