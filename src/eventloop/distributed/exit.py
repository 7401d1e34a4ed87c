"""Ending a process at once, with the processes that it started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading

_FLUSH_S = 1.0


def end_process(status: int) -> None:
    """Ends this process and its workers; never returns.

    Python's own way out would wait for threads and groups in which other ranks are missing, and
    a data loader's workers would notice five seconds later.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    # Whoever is stuck in a write holds the lock of the stream.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(status)


def kill_rank(pid: int) -> None:
    """Kills a rank of this machine with the processes that it started, stopped ones too."""
    kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kills what is left of a rank that a launcher started, in a session of its own.

    Its number is the rank's process id, which no other process has while one of them is left.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
