"""One process at a time in a run's folder: a lock that ends with the process that holds it."""

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
from eventloop.text import as_set, one_line

MAX_BYTES = 1_000
_LOCK = ".lock"
_HOLDER = ".lock.json"


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
        self._files = RunFolder(run_dir)
        self._lock = FileLock(run_dir / _LOCK)
        self._held: tuple[int, int] | None = None  # the file, whatever its name leads to by now

    def acquire(self) -> None:
        """Takes the lock; does nothing where this object holds it.

        Raises:
            ResumeError: another process has it; the message has its number and host.
            RunFolderError: something that isn't a file has its name, or that of who holds it.
            SettingError: the folder can't be made, or locked.
        """
        if self._lock.is_locked:
            return
        who = {"process": os.getpid(), "host": platform.node()}
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            # `FileLock` opens it by itself: without following a link, and without emptying it.
            self._files.check(_LOCK, in_place=True)
            self._files.check(_HOLDER)
            self._lock.acquire(timeout=0)
            self._held = _file_at(self._run_dir / _LOCK)
            self._files.write(_HOLDER, json.dumps(who).encode("ascii"))
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            raise SettingError(
                f"run_dir: {one_line(repr(str(self._run_dir)))} can't be locked: "
                f"{error.strerror or error}",
                fix="see what is at `.lock` in it, or give another folder, "
                f"{as_set(run_dir='FOLDER')}",
            ) from error

    def require(self) -> None:
        """Makes sure that the run's folder is still there, with the lock in it.

        Raises:
            ResumeError: it was deleted, moved or replaced, so that nothing saved would be found,
                and another process could train in its place.
        """
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
        """Returns the error that names the holder of the lock."""
        who = self._who()
        if who == told(json.dumps({"process": os.getpid(), "host": platform.node()}).encode()):
            return ResumeError(
                f"another Trainer of this process trains in {one_line(str(self._run_dir))}",
                fix="close it: `trainer.close()`, or `with Trainer(...) as trainer:`",
            )
        return ResumeError(
            f"another process trains in {one_line(str(self._run_dir))}",
            by=who,
            fix="wait for it or stop it, or give another run_dir",
        )

    def _who(self) -> str:
        """Describes the holder of the lock, as far as can be read."""
        try:
            return told(self._files.read(_HOLDER, MAX_BYTES))
        except OSError:
            return told(b"")


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        there = path.stat()
    except OSError:
        return None
    return there.st_dev, there.st_ino


def told(data: bytes) -> str:
    """Returns which process left its number and host, as far as can be read."""
    try:
        who = json.loads(data)
        return f"process {int(who['process'])} on {str(who['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return "a process that didn't leave its number"
