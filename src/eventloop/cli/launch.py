"""`--nproc`: the command started once a rank, as torchrun would, and signals passed on to all.

Torch's launcher would do, if it passed SIGUSR1 on, waited for as long as a checkpoint takes, took
a second Ctrl-C for one, and left it to the ranks to say first who failed (torch 2.13).
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from eventloop.cli.arguments import CommandOption
from eventloop.errors import UsageError, counted
from eventloop.plugin.records import fold

if TYPE_CHECKING:
    from eventloop.failing.bulletin import Bulletin

_POLL_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM)
_PASSED = (*_STOPPING, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_STOPPED = (130, 143)
# Seconds after a failure, and what is sent then to ranks that are still there.
_DUE = ((4.5, signal.SIGTERM), (8.0, signal.SIGKILL))
OPTION = CommandOption("nproc", "N", "train in N processes on this machine, as torchrun would")


def launch(command: str, argv: Sequence[str], nproc: str) -> int:
    """Runs a command in several processes, and waits for them.

    Args:
        argv: what follows the command, `--nproc` included.
        nproc: the value of that option.

    Returns:
        The exit status of the first process that failed; 128 and the signal that ended it.

    Raises:
        UsageError: `nproc` is no number of processes, or torchrun has started this one.
    """
    num = _number(nproc)
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"--nproc {nproc}, but torchrun has started this process as one of "
            f"{os.environ.get('WORLD_SIZE', 'several')} already",
            fix="leave --nproc out, or start it without torchrun",
        )
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if num > num_cores:
        sys.stderr.write(f"warning: {num} processes share {counted(num_cores, 'core')}\n")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num)))
    return _run(num, ["-m", "eventloop", command, *without_nproc(argv)])


def without_nproc(argv: Sequence[str]) -> list[str]:
    """Leaves `--nproc N` out of a command line."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--") and fold(name[2:]) == OPTION.name:
            if not equals:
                next(words)
        else:
            kept.append(word)
    return kept


def _number(nproc: str) -> int:
    if not (nproc.isascii() and nproc.isdigit() and int(nproc) > 0):
        raise UsageError(
            f"--nproc takes a number of processes, not {nproc!r}", fix="write `--nproc 2`"
        )
    return int(nproc)


def _run(num: int, arguments: list[str]) -> int:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

    from eventloop.failing.bulletin import Bulletin
    from eventloop.ranks.distributed import rank_variables

    # Held by this process, so that no rank takes it away from the others.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, *arguments]
    ranks = _Ranks()
    with ranks.passing_signals_on():
        for rank in range(num):
            ranks.start(command, rank_variables(rank, num, store.port))
        ranks.wait()
    return _told_status(ranks, Bulletin(store, -1, num, "0"))


def _told_status(ranks: _Ranks, bulletin: Bulletin) -> int:
    """Gives the exit status of the rank that failed first, and says how it ended."""
    if ranks.first is None:
        return 0
    failure = bulletin.first_failure()
    if failure is not None and not bulletin.is_told():
        sys.stderr.write(failure.report)
    rank = ranks.first if failure is None else failure.rank
    process = ranks.processes[rank]
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if ranks.asked_to_stop:
        return status if status in _STOPPED else 128 + ranks.received[0]
    if status in _STOPPED:
        return status
    how = f"ended with status {status}"
    if process.returncode < 0:
        how = f"was ended by {signal.Signals(-process.returncode).name}"
    others = "; the others were stopped" if len(ranks.processes) > 1 else ""
    sys.stderr.write(f"rank {rank} {how} (process {process.pid}){others}\n")
    return status


class _Ranks:
    """The processes of all ranks.

    Attributes:
        processes: in order of rank.
        received: the signals that came, in order.
        first: the rank that ended first with another status than 0.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received: list[int] = []
        self.first: int | None = None

    @property
    def asked_to_stop(self) -> bool:
        """Whether a signal did."""
        return any(number in _STOPPING for number in self.received)

    def start(self, command: list[str], variables: dict[str, str]) -> None:
        """Starts a rank, in a session of its own: a terminal's Ctrl-C comes once, from here."""
        environment = os.environ | variables
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.processes.append(process)

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Passes what this process receives on to the ranks."""
        previous = {number: signal.signal(number, self._pass_on) for number in _PASSED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def wait(self) -> None:
        """Waits for all.

        When one has failed, those that train end by themselves; the others are told to, and what
        is left is killed. Who was asked to stop has all the time that a checkpoint takes.
        """
        due = [*_DUE]
        hurries_since = math.inf
        while any(process.poll() is None for process in self.processes):
            time.sleep(_POLL_S)
            now = time.monotonic()
            if self._has_failed() or self.received.count(signal.SIGINT) > 1:
                hurries_since = min(hurries_since, now)
            while due and now - hurries_since > due[0][0]:
                _, number = due.pop(0)
                self._end(number)
        self._has_failed()

    def _has_failed(self) -> bool:
        """Tells whether a rank ended with a failure; notes the first."""
        failed = [idx for idx, one in enumerate(self.processes) if one.poll()]
        if failed and self.first is None:
            self.first = failed[0]
        is_wanted = self.asked_to_stop or all(
            self.processes[idx].returncode in _STOPPED for idx in failed
        )
        return bool(failed) and not is_wanted

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
        # One rank's wish for a checkpoint is everybody's.
        for process in self.processes if number in _STOPPING else self.processes[:1]:
            process.send_signal(number)

    def _end(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, number)
