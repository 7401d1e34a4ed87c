"""Names of folders under way, and which of them were abandoned.

A folder that is being written or removed is called `.tmp-NAME-ID` and never counts as a checkpoint;
one that is being replaced is called `.was-NAME-ID` and counts until its successor is there. The ID
says which process made it: machine, boot and process namespace in one digest, the process's id, and
eight random digits.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

UNDER_WAY = ".tmp-"
REPLACED = ".was-"
ALIVE_S = 24 * 3600.0

_NAME = re.compile(
    r"\.(?:tmp|was)-(?P<of>ba[0-9]{8,20})-(?P<id>(?P<place>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-[0-9a-f]{8})"
)
# Those of this process that it still works on; one of an earlier process may have the same id.
_ours: set[str] = set()


@contextmanager
def new_id() -> Iterator[str]:
    """Yields an ID that stands for work of this process until the `with` ends."""
    one = f"{this_place()}-{os.getpid()}-{os.urandom(4).hex()}"
    _ours.add(one)
    try:
        yield one
    finally:
        _ours.discard(one)


def is_leftover(folder: Path, *, alone: bool) -> bool:
    """Returns whether a folder has such a name and its process doesn't work on it any more.

    A process of this machine is looked for. Of another machine's nothing is known: its folder is
    left over when nothing in it has changed for a day.

    Args:
        alone: whether the caller knows that no other process writes here.
    """
    name = _NAME.fullmatch(folder.name)
    if name is None or name["id"] in _ours:
        return False
    pid = int(name["pid"])
    if alone or (name["place"] == this_place() and pid == os.getpid()):
        return True
    if name["place"] == this_place():
        return not is_alive(pid)
    return time.time() - _changed_at(folder) > ALIVE_S


def is_replaced(folder: Path) -> bool:
    """Returns whether a folder has the name of a checkpoint that is being replaced."""
    return folder.name.startswith(REPLACED)


def name_inside(folder: Path) -> str:
    """Returns the name of the checkpoint that was being written, removed or replaced."""
    name = _NAME.fullmatch(folder.name)
    return name["of"] if name else folder.name


def is_alive(pid: int) -> bool:
    """Returns whether a process of this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _changed_at(folder: Path) -> float:
    """Returns the newest time of change in a folder, in seconds; now, if it is just going away."""
    try:
        inside = () if folder.is_symlink() else os.scandir(folder)
        paths = [folder, *(Path(one) for one in inside)]
        return max(path.lstat().st_mtime for path in paths)
    except OSError:
        return time.time()


@cache
def this_place() -> str:
    """Returns what distinguishes this machine since its last start, and this container on it."""
    texts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")):
        try:
            texts.append(path.read_text() if path.name == "boot_id" else str(path.readlink()))
        except OSError:
            continue  # not Linux
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]
