"""Where a run's checkpoints are: in its folder, or at a URL that a storage knows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eventloop.checkpoint.locations import FOLDER
from eventloop.checkpoint.run_lock import Lock, RunLock
from eventloop.checkpoint.store import Found, Store
from eventloop.errors import EventloopError
from eventloop.urls import Place, Url

if TYPE_CHECKING:
    from eventloop.checkpoint.encoding import Nest
    from eventloop.distributed.processes import Processes

DOWNLOADS = "downloads"  # of checkpoints of other runs
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")


class Checkpoints(Protocol):
    """The checkpoints of a run; `Store` and `RemoteCheckpoints` say more of each method."""

    @property
    def folder(self) -> Place:
        """Where they are."""

    def save(self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any]) -> Place:
        """Saves one and returns its place."""

    def found(self, *, digests: bool = False) -> Sequence[Found[Any]]:
        """Returns what looks like a checkpoint, the newest first."""

    def latest(self) -> tuple[Place | None, Sequence[tuple[Place, str]]]:
        """Returns the newest that verifies and is finite, and why newer ones can't be used."""

    def newest_after(self, batch: int) -> int | None:
        """Returns the batch of the newest usable one that has more batches; None without one."""

    def prune(self, keep: Collection[int]) -> Sequence[Place]:
        """Removes all but those of some batches; a usable one always stays."""

    def clear(self, *, alone: bool = False) -> None:
        """Removes what killed processes left; all of it, if no other process writes here."""


@dataclass(frozen=True)
class Storage:
    """Where the files of a run are.

    Args:
        run_dir: the local folder for everything but, maybe, the checkpoints.
        store: the checkpoints.
        lock: what keeps other processes out; a new folder needs none.
    """

    run_dir: Path
    store: Checkpoints
    lock: Lock | None


def storage_of(wanted: Place | None, new_run_dir: Path) -> Storage:
    """Returns where the files of a run are; makes nothing.

    Args:
        wanted: the folder or URL that was given.
        new_run_dir: the folder otherwise.

    Raises:
        UsageError: no storage that is installed knows the URL.
    """
    if isinstance(wanted, Url):
        from eventloop.checkpoint.remote_checkpoints import RemoteCheckpoints
        from eventloop.checkpoint.schemes import storage_for

        run_dir, storage = local_folder(wanted), storage_for(wanted)
        folder = wanted / FOLDER
        store = RemoteCheckpoints(folder, storage.folder(folder), run_dir / FOLDER)
        return Storage(run_dir, store, storage.lock(wanted, RunLock(run_dir)))
    run_dir = wanted or new_run_dir
    return Storage(run_dir, Store(run_dir / FOLDER), RunLock(run_dir) if wanted else None)


def local_folder(url: Url) -> Path:
    """Returns the local folder of a run at a URL: `runs/s3/charlm-3fa9c2d1`; always the same."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:8]
    name = _ODD.sub("-", url.name).strip("-.")[:60] or "run"
    return Path("runs", url.protocol, f"{name}-{digest}")


def local_copy(place: Place, storage: Storage, processes: Processes) -> Path:
    """Returns a checkpoint as a local folder, on all ranks; one on each machine downloads it.

    Raises:
        CheckpointError: it can't be used, or the storage fails.
    """
    if isinstance(place, Path):
        return place
    from eventloop.checkpoint.schemes import checkpoints_at_url

    mine: Path | EventloopError | None = None
    if processes.local_rank == 0:
        copies = storage.run_dir / (FOLDER if place.parent == storage.store.folder else DOWNLOADS)
        try:
            mine = checkpoints_at_url(place.parent, copies).download(place)
        except EventloopError as error:
            mine = error
    outcomes = processes.all_gather(mine)
    for one in outcomes:
        if isinstance(one, EventloopError):
            raise one
    copy: Path = outcomes[processes.rank - processes.local_rank]
    return copy
