"""Which checkpoints of a run are kept, and which temporary folders were abandoned, so that they may be removed.

A folder that is being written or removed is called `.tmp-NAME-ID` and never counts as a checkpoint;
one that is being replaced is called `.was-NAME-ID` and counts until its successor exists. The ID
identifies the process that made it: a digest of machine, boot and process namespace, the process
id, and eight random digits.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from eventloop.distributed.process_ends import is_alive, this_machine
from eventloop.errors import CheckpointError

if TYPE_CHECKING:
    from eventloop.checkpoint.store import AnyPlace, FoundCheckpoint

Item = TypeVar("Item")

UNDER_WAY = ".tmp-"
REPLACED = ".was-"
ALIVE_S = 24 * 3600.0
_NAME = re.compile(
    r"\.(?:tmp|was)-(?P<of>ba[0-9]{8,20})-(?P<id>(?P<machine>[0-9a-f]{8})-(?P<pid>[0-9]{1,10})-[0-9a-f]{8})"
)
# Those of this process that it still works on; one of an earlier process may have the same id.
_ours: set[str] = set()


def to_keep(
    found: Iterable[FoundCheckpoint[Any]], num_newest: int, written: int, best: int | None
) -> set[int]:
    """Returns the batch counts of the checkpoints that stay when one has been written.

    One that isn't finite stays until the next is written, and takes the place of no other.

    Args:
        found: the newest first.
        best: of the best evaluation, if there is one.
    """
    usable = [one.batch for one in found if not one.reason]
    return {*usable[:num_newest], written, *([] if best is None else [best])}


def newest_after(
    batch: int, found: Iterable[FoundCheckpoint[AnyPlace]], is_usable: Callable[[AnyPlace], bool]
) -> int | None:
    """Returns the batch count of the newest usable checkpoint after `batch`, if any.

    Args:
        found: the newest first, not verified.
        is_usable: reads and verifies a whole checkpoint.
    """
    newer = (one for one in found if one.batch > batch and not one.reason)
    return next((one.batch for one in newer if is_usable(one.path)), None)


def surplus(
    keep: Sequence[Item], others: Sequence[Item], is_usable: Callable[[Item], bool]
) -> list[Item]:
    """Returns those of `others` that can be deleted, the oldest first; one that is usable is kept."""
    if not others:
        return []
    safe = next((one for one in [*keep, *others] if is_usable(one)), None)
    return [] if safe is None else [one for one in reversed(others) if one != safe]


def remove_each(items: Iterable[Item], remove: Callable[[Item], object]) -> None:
    """Removes each item; raises the first CheckpointError when all were tried."""
    failures = []
    for item in items:
        try:
            remove(item)
        except CheckpointError as error:
            failures.append(error)
    if failures:
        raise failures[0]


@contextmanager
def new_id() -> Iterator[str]:
    """Yields an ID that marks folders as this process's until the `with` block ends."""
    one = f"{this_machine()}-{os.getpid()}-{os.urandom(4).hex()}"
    _ours.add(one)
    try:
        yield one
    finally:
        _ours.discard(one)


def is_leftover(folder: Path, *, alone: bool) -> bool:
    """Returns whether a folder is temporary and was abandoned by its process.

    A process of this machine is looked up. A folder of another machine counts as abandoned when
    nothing in it has changed for a day.

    Args:
        alone: whether the caller knows that no other process writes here.
    """
    name = _NAME.fullmatch(folder.name)
    if name is None or name["id"] in _ours:
        return False
    pid = int(name["pid"])
    if alone or (name["machine"] == this_machine() and pid == os.getpid()):
        return True
    if name["machine"] == this_machine():
        return not is_alive(pid)
    return time.time() - _changed_at(folder) > ALIVE_S


def is_replaced(folder: Path) -> bool:
    """Returns whether a folder has the name of a checkpoint that is being replaced."""
    return folder.name.startswith(REPLACED)


def name_inside(folder: Path) -> str:
    """Returns the name of the checkpoint that was being written, removed or replaced."""
    name = _NAME.fullmatch(folder.name)
    return name["of"] if name else folder.name


def _changed_at(folder: Path) -> float:
    """Returns the latest modification time in a folder, in seconds; now, if it is being removed."""
    try:
        inside = () if folder.is_symlink() else os.scandir(folder)
        paths = [folder, *(Path(one) for one in inside)]
        return max(path.lstat().st_mtime for path in paths)
    except OSError:
        return time.time()
