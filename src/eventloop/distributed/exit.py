"""How a process ends: what is said of a failure, its exit status, and its end with its children."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from eventloop.config.layers import TIMEOUT_VARIABLE
from eventloop.errors import (
    CheckpointError,
    EventloopError,
    SettingError,
    UsageError,
    notes_of,
    text_of,
)
from eventloop.signals import Interrupted, Terminated
from eventloop.text import plain

_FLUSH_S = 1.0
FAILURE, WRONG_USAGE, NO_CHECKPOINT = 1, 2, 4


def end_process(status: int) -> None:
    """Ends this process and its workers; never returns.

    Python's own way out would wait for threads and groups in which other ranks are missing, and
    a data loader's workers would notice five seconds later.
    """
    # Whatever starts workers has imported it; an import here could wait for another thread's.
    processes = sys.modules.get("multiprocessing.process")
    for worker in processes.active_children() if processes else ():
        with contextlib.suppress(AssertionError):  # a fork has its parent's list: not its workers
            if worker.is_alive():
                worker.kill()
    # A thread that is stuck in a write holds the lock of the stream.
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


def timeout_s() -> float:
    """Returns how long ranks wait for each other in a collective: 1,800 s, or the variable's.

    Raises:
        SettingError: EVENTLOOP_TIMEOUT_S isn't a number of seconds.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or "1800"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise SettingError(
            f"{TIMEOUT_VARIABLE}={text!r} isn't a number of seconds",
            fix=f"unset it, or write `{TIMEOUT_VARIABLE}=600`",
        )
    return seconds


_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def ending_with_parent() -> Callable[[], None] | None:
    """Returns a `preexec_fn` for a process that gets SIGTERM when its parent is gone.

    A process that is killed outright can pass nothing on.

    Returns:
        None except on Linux, since other systems have no such thing.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: after it nothing may be allocated that another thread guards.
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


def has_launcher() -> bool:
    """Returns whether a launcher started this rank that ends with its ranks: torchrun or ours.

    What else may have set RANK, a shell script say, is free to end before the ranks do.
    """
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def end_with_launcher() -> None:
    """Has the kernel kill this rank when its launcher is gone, even if it can't run Python.

    SIGKILL, since a rank that is stopped or holds the GIL heeds nothing else; it may hit a
    checkpoint that is being written, as any kill may. The signal comes when the thread ends that
    started this process: both launchers start ranks in the thread that waits for them. A launcher
    that is gone already is noticed when its store is asked for.

    Elsewhere than on Linux the watchdog notices that the store is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def in_ranks() -> bool:
    """Returns whether this process is one of several that train together."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def first_line(error: BaseException) -> str:
    """Returns what happened on which rank, and which plugin did it if a note says so."""
    line = summary(error)
    if not in_ranks() or isinstance(error, (Interrupted, Terminated)):
        return line
    return f"rank {os.environ['RANK']}: {line}"


def summary(error: BaseException) -> str:
    """Returns what happened, and which plugin did it if a note says so."""
    text, *more = text_of(error).split("\n")
    raised = [one for one in more if one.startswith(f"{type(error).__name__}: ")]
    if raised and text.startswith("Caught "):  # by a worker of a data loader
        text = f"{raised[-1].partition(': ')[2]} ({text.rstrip('.')})"
    if isinstance(error, (Interrupted, Terminated)):
        return text
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    about_plugins = notes_of(error, "plugins")
    notes = [one for one in getattr(error, "__notes__", []) if one and one not in about_plugins]
    if not isinstance(error, EventloopError) and notes:
        line = f"{line}; {notes[0].partition(chr(10))[0]}"
    return plain(line)


def exit_status(error: BaseException) -> int:
    """Returns the exit status of the command.

    Returns:
        2 for wrong usage, 4 where a checkpoint can't be used or written, 130 and 143 for signals,
        else 1.
    """
    if isinstance(error, Interrupted):
        return 130
    if isinstance(error, Terminated):
        return 143
    if isinstance(error, CheckpointError):
        return NO_CHECKPOINT
    return WRONG_USAGE if isinstance(error, UsageError) else FAILURE


def details(error: BaseException) -> str:
    """Returns what follows the first line: the rest of a message, or a traceback, and notes."""
    if isinstance(error, (Interrupted, Terminated)):
        return ""
    if not isinstance(error, EventloopError):
        return plain("".join(traceback.format_exception(error)))
    lines = [*text_of(error).split("\n")[1:], *getattr(error, "__notes__", [])]
    return plain("".join(f"{line}\n" for line in lines))
