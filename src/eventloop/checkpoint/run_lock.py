"""The lock of a run's folder: one process at a time; it ends with the process that holds it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from eventloop.errors import ResumeError, SettingError
from eventloop.files.run_folder import RunFolder
from eventloop.fixes import as_set
from eventloop.safe_text import one_line

_MAX_BYTES = 1_000
_LOCK = ".lock"
_HOLDER = ".lock.json"


class Lock(Protocol):
    """Keeps other processes from training the same run, as far as the storage allows."""

    def acquire(self) -> None:
        """Acquires the lock unless this object holds it; raises ResumeError if another process has it."""

    def require(self) -> None:
        """Raises ResumeError if another process has the lock by now; called before each save."""

    def release(self) -> None:
        """Releases the lock."""


class RunLock:
    """The lock of a run's folder. The operating system releases it when the process ends."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = RunFolder(run_dir)
        self._lock = FileLock(run_dir / _LOCK)
        self._held: tuple[int, int] | None = None  # the file, whatever its name leads to by now

    def acquire(self) -> None:
        """Acquires the lock, see `Lock`; raises SettingError if the folder can't be made or locked."""
        if self._lock.is_locked:
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            # `FileLock` opens it by itself: without following a link, and without emptying it.
            self._files.check(_LOCK, in_place=True)
            self._files.check(_HOLDER)
            self._lock.acquire(timeout=0)
            self._held = _file_at(self._run_dir / _LOCK)
            self._files.write(_HOLDER, _this_holder())
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            raise SettingError(
                f"run_dir: {one_line(repr(str(self._run_dir)))} can't be locked: "
                f"{error.strerror or error}",
                fix="see what is at `.lock` in it, or give another folder, "
                + as_set(run_dir="FOLDER"),
            ) from error

    def require(self) -> None:
        """Checks that the run's folder still exists and contains the lock; see `Lock.require`."""
        if self._lock.is_locked and _file_at(self._run_dir / _LOCK) != self._held:
            raise ResumeError(
                f"the run's folder {one_line(repr(str(self._run_dir)))} was deleted or replaced "
                "while the run was under way",
                fix="leave a run's folder alone until the run has ended; start it again with "
                "another run_dir, or restore the folder from a copy",
            )

    def release(self) -> None:
        """Releases the lock."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._files.remove(_HOLDER)
            self._lock.release()

    def _taken(self) -> ResumeError:
        """Returns the error that names the holder of the lock, as far as it can be read."""
        try:
            who = lock_holder(self._files.read(_HOLDER, _MAX_BYTES))
        except OSError:
            who = lock_holder(b"")
        if who == lock_holder(_this_holder()):
            return ResumeError(
                f"another Trainer of this process trains in {one_line(str(self._run_dir))}",
                fix="close it: `trainer.close()`, or `with Trainer(...) as trainer:`",
            )
        return ResumeError(
            f"another process trains in {one_line(str(self._run_dir))}",
            by=who,
            fix="wait for it or stop it, or give another run_dir",
        )


def _this_holder() -> bytes:
    return json.dumps({"process": os.getpid(), "host": platform.node()}).encode("ascii")


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_dev, there.st_ino


def lock_holder(data: bytes) -> str:
    """Describes the process that wrote its id and host, as far as they can be read."""
    try:
        who = json.loads(data)
        return f"process {int(who['process'])} on {str(who['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "a process that didn't leave its number"
