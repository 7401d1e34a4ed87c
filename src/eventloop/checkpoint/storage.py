"""Where checkpoints are: a run's, in its folder or at a URL, and those that a path refers to."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.checkpoint.manifest import BEGINNING, FILE
from eventloop.checkpoint.run_lock import Lock, RunLock
from eventloop.checkpoint.store import AnyPlace, FoundCheckpoint, Store, look_at
from eventloop.checkpoint.verifying import batch_of
from eventloop.errors import CheckpointError, EventloopError, UsageError, closest
from eventloop.files.disk import CorruptFileError, OldFile
from eventloop.urls import Place, Url

if TYPE_CHECKING:
    from eventloop.checkpoint.storage_packages import UrlCheckpoints
    from eventloop.distributed.processes import Processes

DOWNLOADS = "downloads"  # of checkpoints of other runs
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")
FOLDER = "checkpoints"  # of a run
_MOST_NAMED = 3


@dataclass(frozen=True)
class Storage:
    """Where the files of a run are.

    Args:
        run_dir: the local folder for everything; the checkpoints can be elsewhere.
        store: the checkpoints.
        lock: keeps other processes out; None for a new folder.
    """

    run_dir: Path
    store: Store | UrlCheckpoints
    lock: Lock | None


def storage_of(wanted: Place | None, new_run_dir: Path) -> Storage:
    """Returns where the files of a run are; creates nothing.

    Args:
        wanted: the requested folder or URL.
        new_run_dir: the folder to use if none was requested.

    Raises:
        UsageError: no installed storage knows the URL.
    """
    if isinstance(wanted, Url):
        from eventloop.checkpoint.storage_packages import storage_for

        run_dir, storage = local_folder(wanted), storage_for(wanted)
        store = storage.checkpoints(wanted / FOLDER, run_dir / FOLDER)
        return Storage(run_dir, store, storage.lock(wanted, RunLock(run_dir)))
    run_dir = wanted or new_run_dir
    return Storage(run_dir, Store(run_dir / FOLDER), RunLock(run_dir) if wanted else None)


def new_run_dir(task_name: str) -> Path:
    """Returns the unique path of a new run folder: `runs/digits/20260131-120000-3fa9`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs", task_name or "task", f"{stamp}-{os.urandom(2).hex()}")


def local_folder(url: Url) -> Path:
    """Returns the local folder for a run at a URL, always the same: `runs/s3/charlm-3fa9c2d1`."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:8]
    name = _ODD.sub("-", url.name).strip("-.")[:60] or "run"
    return Path("runs", url.protocol, f"{name}-{digest}")


def local_copy(place: Place, storage: Storage, processes: Processes) -> Path:
    """Returns the local folder of a checkpoint, on all ranks; one rank per machine downloads it.

    Raises:
        CheckpointError: it can't be used, or the storage fails.
    """
    if isinstance(place, Path):
        return place
    from eventloop.checkpoint.storage_packages import storage_for

    mine: Path | EventloopError | None = None
    if processes.local_rank == 0:
        copies = storage.run_dir / (FOLDER if place.parent == storage.store.folder else DOWNLOADS)
        try:
            mine = storage_for(place).checkpoints(place.parent, copies).download(place)
        except EventloopError as error:
            mine = error
    outcomes = processes.all_gather(mine)
    for one in outcomes:
        if isinstance(one, EventloopError):
            raise one
    copy: Path = outcomes[processes.rank - processes.local_rank]
    return copy


def checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoints that a path refers to, the newest first.

    Args:
        path: a run's folder, its `checkpoints`, or a checkpoint.

    Raises:
        UsageError: there is no such folder.
        CheckpointError: it can't be listed.
    """
    if not path.is_dir():
        raise _no_folder(path)
    # The path is the user's and may be a link; what is in a run's folder may be a stranger's.
    own, inside = path.resolve() if path.is_symlink() else path, path / FOLDER
    if _is_checkpoint(path):
        return [own]
    return Store(inside if os.path.lexists(inside) else own).paths()


def best_among(found: Iterable[FoundCheckpoint[AnyPlace]]) -> FoundCheckpoint[AnyPlace] | None:
    """Returns the checkpoint of the best evaluation, as the newest one records it; None without.

    Args:
        found: the checkpoints of a run, the newest first.
    """
    usable = [one for one in found if not one.reason]
    best = next((one.facts["best"] for one in usable if "best" in one.facts), None)
    return next((one for one in usable if one.batch == best), None)


def checkpoint_at(path: Path) -> tuple[Path, list[FoundCheckpoint[Path]]]:
    """Returns the checkpoint that a path refers to; for a run, the newest usable one.

    Returns:
        The checkpoint, and newer ones of the run that can't be used.

    Raises:
        UsageError: there is none.
        CheckpointError: there are some, but none verifies and is finite.
    """
    refused: list[FoundCheckpoint[Path]] = []
    paths: list[Path] = []
    while not paths or len(refused) < len(paths):  # a run under way has removed some meanwhile
        paths, refused = require_checkpoints(path), []
        if len(paths) == 1:  # reading it reports what is wrong with it
            return paths[0], []
        for one in paths:
            found = look_at(one, digests=True)
            if not found.reason:
                return one, refused
            if os.path.lexists(one):
                refused.append(found)
    raise unusable(path, [(one.path, one.reason) for one in refused])


def unusable(place: Place, refused: Sequence[tuple[Place, str]]) -> CheckpointError:
    """Returns the error for checkpoints that are all unusable, each with the reason."""
    listed = "\n    ".join(f"{one.name}: {why}" for one, why in refused)
    where = f"in {str(place)!r}" if isinstance(place, Path) else f"at {place}"
    return CheckpointError(
        f"none of the {len(refused)} checkpoints {where} can be used"
        if len(refused) > 1
        else f"the only checkpoint {where} can't be used",
        reasons=f"\n    {listed}",
        fix="restore one from a copy, or begin a new run in another run_dir",
    )


def require_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints that a path refers to, at least one.

    Raises:
        UsageError: there is none.
        CheckpointError: they can't be listed.
    """
    paths = checkpoints_at(path)
    if not paths:
        raise UsageError(
            why_none(path), fix="name the folder of a run that has saved, or that of a checkpoint"
        )
    return paths


def why_none(path: Path) -> str:
    """Returns why a folder has no checkpoints, and which runs inside it have some."""
    runs = sorted((one.parent.name for one in path.glob(f"*/{FOLDER}")), reverse=True)
    if not runs:
        return f"there are no checkpoints in {str(path)!r}"
    named = ", ".join(map(repr, runs[:_MOST_NAMED]))
    more = f" and {len(runs) - _MOST_NAMED} more" if len(runs) > _MOST_NAMED else ""
    return f"there are no checkpoints in {str(path)!r} itself, but it has the runs {named}{more}"


def _is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint, by its name or content."""
    if batch_of(path.name) is not None:
        return True
    try:
        with OldFile(path / FILE) as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except CorruptFileError:
        return False


def _no_folder(path: Path) -> UsageError:
    if path.exists():
        whole = _is_checkpoint(path.parent)
        return UsageError(
            f"{str(path)!r} is a file, but runs and checkpoints are folders",
            fix=f"name the folder: {str(path.parent)!r}" if whole else "name a folder",
        )
    there = path.parent
    names = [one.name for one in there.iterdir()] if there.is_dir() else []
    return UsageError(
        f"there is no folder {str(path)!r}{closest(path.name, names)}",
        fix="name the folder of a run, `runs/digits/20260131-120000-3fa9` say, or of a checkpoint",
    )
