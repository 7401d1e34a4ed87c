"""One process at a time in a run's folder: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from eventloop.errors import ResumeError

MAX_BYTES = 1_000


class Lock(Protocol):
    """What keeps other processes out of a run, as well as that can be done where it is."""

    def acquire(self) -> None:
        """Acquires it; has no effect where it is held already.

        Raises:
            ResumeError: another process has it.
        """

    def require(self) -> None:
        """Checks that it is still held; called before each save.

        Raises:
            ResumeError: another process has it now.
        """

    def release(self) -> None:
        """Releases it."""


class RunLock:
    """The lock of a run's folder. The operating system gives it up with the process.

    Args:
        run_dir: of the run; made if it isn't there.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = FileLock(run_dir / ".lock")
        self._holder = run_dir / ".lock.json"

    def acquire(self) -> None:
        """Takes the lock; again, where it is held already.

        Raises:
            ResumeError: another process has it; the message has its number and host.
        """
        if self._lock.is_locked:
            return
        self._run_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise self._taken() from None
        who = {"process": os.getpid(), "host": platform.node()}
        self._holder.write_text(json.dumps(who), encoding="utf-8")

    def require(self) -> None:
        """Does nothing: no other process can take over."""

    def release(self) -> None:
        """Gives the lock back."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._holder.unlink()
            self._lock.release()

    def _taken(self) -> ResumeError:
        """Says who holds the lock: another process, or this one."""
        who = self._who()
        if who == told(json.dumps({"process": os.getpid(), "host": platform.node()}).encode()):
            return ResumeError(
                f"another Trainer of this process trains in {self._run_dir}",
                fix="close it: `trainer.close()`, or `with Trainer(...) as trainer:`",
            )
        return ResumeError(
            f"another process trains in {self._run_dir}",
            by=who,
            fix="wait for it or stop it, or give another run_dir",
        )

    def _who(self) -> str:
        """Says who holds the lock, as far as can be read."""
        try:
            with self._holder.open("rb") as file:
                return told(file.read(MAX_BYTES))
        except OSError:
            return told(b"")


def told(data: bytes) -> str:
    """Says which process left its number and host, as far as can be read."""
    try:
        who = json.loads(data)
        return f"process {int(who['process'])} on {str(who['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "a process that didn't leave its number"
