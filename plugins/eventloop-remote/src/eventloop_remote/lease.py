"""Leases for runs at a URL: stores have no locks, so a lease, renewed regularly, marks the owner.

It is not a lock: two processes that begin in the same second may both get it. The process that loses its
lease notices before its next save, and stops.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from eventloop import CheckpointError, ResumeError
from eventloop.storage import Lock, Url, is_alive, this_machine
from eventloop_remote.objects import Objects

FILE = ".lease.json"
MAX_BYTES = 1_000
RENEW_S = 30.0
NUM_LOOKS = 4  # number of checks whether a lease is renewed

_ours: set[str] = set()  # leases that this process holds


class Lease:
    """The lease on a run at a URL, and the lock of its local folder.

    Args:
        url: URL of the run.
        objects: the objects at the URL.
        local: lock of the local folder, for all files except checkpoints.
        pause: waits for a number of seconds.
    """

    def __init__(
        self,
        url: Url,
        objects: Objects,
        local: Lock,
        *,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._url = url
        self._local = local
        self._pause = pause
        self._objects = objects
        self._id = secrets.token_hex(8)
        self._is_held = False
        self._ended = threading.Event()
        self._guard = threading.Lock()  # a connection can't be used from two threads at once

    def acquire(self) -> None:
        """Takes the lease, also if this process holds it already.

        A lease whose process is known to have ended is free. For any other lease, waits to see whether it
        is renewed, which shows that its process is training. Clocks of machines are never compared.

        Raises:
            ResumeError: another process has it; the message has its number and host.
            CheckpointError: the store fails.
        """
        if self._is_held:
            return
        self._local.acquire()
        try:
            self._require_free()
            self._write()
            self.require()
        except BaseException:
            self._local.release()
            raise
        self._is_held = True
        _ours.add(self._id)
        self._ended.clear()
        threading.Thread(target=self._renew, name="eventloop-lease", daemon=True).start()

    def require(self) -> None:
        """Checks that no other process has taken the lease.

        Raises:
            ResumeError: another process has taken it.
            CheckpointError: the store fails.
        """
        with self._guard:
            data = self._read()
        if not self._is_ours(data):
            raise ResumeError(
                f"another process trains at {self._url} now",
                by=_holder(data or b""),
                fix="leave it to that one, or give another run_dir",
            )

    def release(self) -> None:
        """Releases the lease."""
        self._ended.set()
        if self._is_held:
            self._is_held = False
            _ours.discard(self._id)
            with self._guard, suppress(CheckpointError):  # it expires when it isn't renewed
                if self._is_ours(self._read()):
                    self._objects.remove(FILE)
        self._local.release()

    def renew(self) -> bool:
        """Renews the lease; returns False if it no longer belongs to this process."""
        with self._guard, suppress(CheckpointError):  # the next renewal may succeed
            if not self._is_ours(self._read()):
                return False
            if not self._ended.is_set():
                self._write()
        return True

    # How

    def _require_free(self) -> None:
        data = self._read()
        if data is None or _has_ended(data):
            return
        if _value(data).get("id") not in _ours:
            warnings.warn(
                f"{_holder(data)} trained at {self._url} last and didn't say that it has ended; "
                f"waiting up to {NUM_LOOKS * RENEW_S:.0f} s to see whether it still does",
                stacklevel=2,
            )
            if not self._is_renewed(data):
                return
        raise ResumeError(
            f"another process trains at {self._url}",
            by=_holder(data),
            fix="wait for it or stop it, or give another run_dir",
        )

    def _is_renewed(self, previous_data: bytes) -> bool:
        for _ in range(NUM_LOOKS):
            self._pause(RENEW_S)
            data = self._read()
            if data != previous_data:
                return data is not None
        return False

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S) and self.renew():
            pass

    def _read(self) -> bytes | None:
        try:
            return self._objects.read(FILE, MAX_BYTES)
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        lease = {
            "process": os.getpid(),
            "host": platform.node(),
            "place": this_machine(),
            "id": self._id,
            "renewed": datetime.now(UTC).isoformat(),
        }
        self._objects.write(json.dumps(lease).encode(), FILE)

    def _is_ours(self, data: bytes | None) -> bool:
        return _value(data or b"").get("id") == self._id


def _has_ended(data: bytes) -> bool:
    """Whether the process of a lease is known to have ended.

    A running process with its number may be a different one: containers count processes from 1.
    """
    lease = _value(data)
    match lease:
        case {"place": str(place), "process": int(pid)} if place == this_machine() and pid > 0:
            return lease.get("id") not in _ours if pid == os.getpid() else not is_alive(pid)
    return False


def _holder(data: bytes) -> str:
    """Returns the number and host of the lease's process, as far as readable."""
    match _value(data):
        case {"process": int(process), "host": host}:
            return f"process {process} on {str(host)[:100]!r}"
    return "a process that didn't record its id"


def _value(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
