"""Processes that are to end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
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
