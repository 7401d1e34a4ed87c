"""The lock of a run's folder, which only one process can hold; it ends with the process."""

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
        """Acquires the lock, unless this object has it already.

        Raises:
            ResumeError: another process has the lock.
        """

    def require(self) -> None:
        """Raises ResumeError if another process has the lock now; called before each save."""

    def release(self) -> None:
        """Releases the lock."""


class RunLock:
    """The lock of a run's folder. The operating system releases it when the process ends."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._files = RunFolder(run_dir)
        self._lock = FileLock(run_dir / _LOCK)
        # Device and inode of the locked file; the path may lead to another file by now.
        self._locked_file: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Acquires the lock; see `Lock.acquire`.

        Raises:
            ResumeError: another process has the lock.
            SettingError: the folder can't be created or locked.
        """
        if self._lock.is_locked:
            return
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            # `FileLock` opens the file itself, without following links or truncating it.
            self._files.check(_LOCK, in_place=True)
            self._files.check(_HOLDER)
            self._lock.acquire(timeout=0)
            self._locked_file = _file_at(self._run_dir / _LOCK)
            self._files.write(_HOLDER, _this_holder())
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            raise SettingError(
                f"run_dir: {one_line(repr(str(self._run_dir)))} can't be locked: "
                f"{error.strerror or error}",
                fix="check the file `.lock` in it, or set another folder, "
                + as_set(run_dir="FOLDER"),
            ) from error

    def require(self) -> None:
        """Checks that the run's folder still exists and contains the lock; see `Lock.require`."""
        if self._lock.is_locked and _file_at(self._run_dir / _LOCK) != self._locked_file:
            raise ResumeError(
                f"the run's folder {one_line(repr(str(self._run_dir)))} was deleted or replaced "
                "while the run was active",
                fix="don't change a run's folder before the run has ended; start it again with "
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
            holder = lock_holder(self._files.read(_HOLDER, _MAX_BYTES))
        except OSError:
            holder = lock_holder(b"")
        if holder == lock_holder(_this_holder()):
            return ResumeError(
                f"another Trainer of this process trains in {one_line(str(self._run_dir))}",
                fix="close it: `trainer.close()`, or `with Trainer(...) as trainer:`",
            )
        return ResumeError(
            f"another process trains in {one_line(str(self._run_dir))}",
            by=holder,
            fix="wait for it or stop it, or set another run_dir",
        )


def _this_holder() -> bytes:
    return json.dumps({"process": os.getpid(), "host": platform.node()}).encode("ascii")


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def lock_holder(data: bytes) -> str:
    """Describes the process that has the lock, from the id and host that it wrote, if readable."""
    try:
        holder = json.loads(data)
        return f"process {int(holder['process'])} on {str(holder['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "a process that didn't record its id"
