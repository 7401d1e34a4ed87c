"""Ends a rank that hangs after a good end: in an exit handler, or for a thread that isn't a daemon.

All work is done by then, so nothing but the rank's own code is waited for, and the launcher would
wait for ever. A thread notices while Python runs; the launcher ends a rank that can't run Python.
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

# After the end of the run; the launcher's limit is longer, so that the rank tells first.
LATE_S = 6.0
_FIX = "end it in the plugin's `close`, which may take as long as it needs, or make it a daemon"


def limit_end(label: str, limit_s: float = LATE_S) -> None:
    """Ends this process, with status 1 and a line that says why, unless it ends within the limit.

    Args:
        label: what messages call this rank.
    """
    arguments = (label, limit_s, threading.main_thread().ident)
    threading.Thread(target=_end_late, args=arguments, name="eventloop end", daemon=True).start()


def _end_late(label: str, limit_s: float, main_thread: int) -> None:
    time.sleep(limit_s)
    what = f"rank {label}: its process {os.getpid()} hasn't ended {limit_s:g} s after the run"
    # Past the locks of sys.stderr, which a thread that hangs may hold.
    report = f"{what}: {one_line(waits_in(main_thread))}\n  fix  {_FIX}\n"
    os.write(2, report.encode(errors="backslashreplace"))
    end_process(FAILURE)


def waits_in(main_thread: int) -> str:
    """Returns what the end of this process waits for: its threads and children, or an exit handler."""
    waiting = [*_threads(main_thread), *_children()]
    if waiting:
        return "it waits for " + ", ".join(waiting)
    # A handler that is a function of C, `time.sleep` say, has no frame.
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
