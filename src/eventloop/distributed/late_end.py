"""Ends a rank that hangs after a successful run: in an exit handler, or for a non-daemon thread.

All work is done by then, and the launcher would wait forever. A thread notices the hang as long as
Python runs; the launcher ends a rank in which Python doesn't run any more.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator

from eventloop.distributed.process_ends import FAILURE, end_process
from eventloop.distributed.thread_location import line_of_thread
from eventloop.safe_text import one_line

# Time to exit after the run. The launcher's limit is longer, so that the rank reports first: only the
# rank can say what it waits for.
LATE_S = 6.0
_FIX = "end it in the plugin's `close`, which may take as long as it needs, or make it a daemon"


def limit_end(label: str, limit_s: float = LATE_S) -> None:
    """Ends this process with status 1 and a line with the reason, unless it exits within the limit.

    Args:
        label: the name of this rank in messages.
    """
    arguments = (label, limit_s, threading.main_thread().ident)
    threading.Thread(target=_end_late, args=arguments, name="eventloop end", daemon=True).start()


def _end_late(label: str, limit_s: float, main_thread: int) -> None:
    time.sleep(limit_s)
    problem = f"rank {label}: its process {os.getpid()} hasn't ended {limit_s:g} s after the run"
    # Written without the lock of sys.stderr, which a hanging thread may hold.
    report = f"{problem}: {one_line(waits_in(main_thread))}\n  fix  {_FIX}\n"
    os.write(2, report.encode(errors="backslashreplace"))
    end_process(FAILURE)


def waits_in(main_thread: int) -> str:
    """Returns a clause with the threads, child processes or exit handler that delay the exit."""
    waiting = [*_threads(main_thread), *_children()]
    if waiting:
        return "it waits for " + ", ".join(waiting)
    # An exit handler that is a C function, such as `time.sleep`, has no frame.
    if main_thread not in sys._current_frames():
        return "it is in an exit handler that isn't written in Python"
    return f"it is in an exit handler, {_line(main_thread)}"


def _threads(main_thread: int) -> Iterator[str]:
    for thread in threading.enumerate():
        if not thread.daemon and thread.ident not in (None, main_thread):
            yield f"the thread {thread.name!r}, {_line(thread.ident or 0)}"


def _line(ident: int) -> str:
    return line_of_thread(ident).removeprefix("between hooks, ")


def _children() -> Iterator[str]:
    """Yields the processes of multiprocessing that an exit handler of Python waits for."""
    for process in multiprocessing.active_children():
        if not process.daemon:
            yield f"the process {process.name!r} ({process.pid})"
