"""Decides which checkpoints of a run are kept, and which temporary folders were abandoned.

A folder that is being written or removed is called `.tmp-NAME-ID` and never counts as a checkpoint.
A checkpoint that is being replaced is called `.was-NAME-ID` and counts until its successor exists.
The ID identifies the process that created the folder: a digest of machine, boot and process
namespace, the process id, and eight random digits.
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
# The IDs of folders that this process is working on. A folder of an earlier process may have the same
# process id, so the process id isn't enough.
_ours: set[str] = set()


def to_keep(
    checkpoints: Iterable[FoundCheckpoint[Any]], num_newest: int, written: int, best: int | None
) -> set[int]:
    """Returns the batch counts of the checkpoints to keep after a checkpoint was written.

    A checkpoint that isn't finite stays until the next checkpoint is written, and doesn't count
    towards `num_newest`.

    Args:
        checkpoints: the run's checkpoints, the newest first.
        num_newest: how many usable checkpoints to keep.
        written: the batch count of the checkpoint that was written.
        best: the batch count of the best evaluation, if there is one.
    """
    usable = [checkpoint.batch for checkpoint in checkpoints if not checkpoint.reason]
    return {*usable[:num_newest], written, *([] if best is None else [best])}


def newest_after(
    batch: int, found: Iterable[FoundCheckpoint[AnyPlace]], is_usable: Callable[[AnyPlace], bool]
) -> int | None:
    """Returns the batch count of the newest usable checkpoint after `batch`, if any.

    Args:
        batch: the batch count to start after.
        found: the checkpoints, the newest first, not verified.
        is_usable: reads and verifies a whole checkpoint.
    """
    newer = (
        checkpoint for checkpoint in found if checkpoint.batch > batch and not checkpoint.reason
    )
    return next((checkpoint.batch for checkpoint in newer if is_usable(checkpoint.path)), None)


def surplus(
    keep: Sequence[Item], others: Sequence[Item], is_usable: Callable[[Item], bool]
) -> list[Item]:
    """Returns the checkpoints of `others` that can be removed, the oldest first.

    If no checkpoint of `keep` is usable, the newest usable checkpoint of `others` is kept, too.
    """
    if not others:
        return []
    usable = next((checkpoint for checkpoint in [*keep, *others] if is_usable(checkpoint)), None)
    return (
        []
        if usable is None
        else [checkpoint for checkpoint in reversed(others) if checkpoint != usable]
    )


def remove_each(items: Iterable[Item], remove: Callable[[Item], object]) -> None:
    """Removes each item; raises the first CheckpointError after trying all of them."""
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
    folder_id = f"{this_machine()}-{os.getpid()}-{os.urandom(4).hex()}"
    _ours.add(folder_id)
    try:
        yield folder_id
    finally:
        _ours.discard(folder_id)


def is_leftover(folder: Path, *, alone: bool) -> bool:
    """Returns whether a folder is temporary and was abandoned by its process.

    On this machine, the process is looked up. A folder of another machine counts as abandoned if no
    file in it has changed for a day.

    Args:
        folder: with any name.
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
    """Returns the latest modification time in a folder, in seconds.

    Returns the current time if the folder is being removed at the moment.
    """
    try:
        entries = () if folder.is_symlink() else os.scandir(folder)
        paths = [folder, *(Path(entry) for entry in entries)]
        return max(path.lstat().st_mtime for path in paths)
    except OSError:
        return time.time()
