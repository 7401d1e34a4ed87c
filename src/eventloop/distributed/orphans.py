"""Processes that are to end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # from Linux's sys/prctl.h


def ending_with_parent() -> Callable[[], None] | None:
    """Gives a `preexec_fn` for a process that gets SIGTERM when its parent is gone.

    A process that is killed outright can pass nothing on.

    Returns:
        None elsewhere than on Linux, where no such thing is to be had.
    """
    if sys.platform != "linux":
        return None
    # Looked up before the fork: after it nothing may be allocated that another thread guards.
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask


def has_launcher() -> bool:
    """Returns whether a launcher started this rank that holds the ranks' store: torchrun or ours.

    What else may have set RANK, a shell script say, is free to end before the ranks do.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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
