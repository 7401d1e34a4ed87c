"""Where a run's checkpoints are: in its folder, or at a URL; both have the same methods."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eventloop.checkpoint.nest import Nest
from eventloop.checkpoint.places import FOLDER
from eventloop.checkpoint.run_lock import RunLock
from eventloop.checkpoint.store import Store
from eventloop.errors import EventloopError
from eventloop.urls import Place, Url

if TYPE_CHECKING:
    from eventloop.ranks.processes import Processes

DOWNLOADS = "downloads"  # of checkpoints of other runs
_ODD = re.compile(r"[^A-Za-z0-9_.-]+")


class Seen(Protocol):
    """A checkpoint that was found, or what looks like one."""

    @property
    def batch(self) -> int:
        """How many batches the run had had."""

    @property
    def reason(self) -> str:
        """Why it can't be used, or ""."""


class Checkpoints(Protocol):
    """The checkpoints of a run; `Store` and `RemoteStore` say more of each method."""

    @property
    def folder(self) -> Place:
        """Where they are."""

    def save(self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any]) -> Place:
        """Saves one and gives its place."""

    def found(self, *, digests: bool = False) -> Sequence[Seen]:
        """Gives what looks like a checkpoint, the newest first."""

    def latest(self) -> tuple[Place | None, Sequence[tuple[Place, str]]]:
        """Gives the newest that verifies, and newer ones with why they can't be used."""

    def newest_after(self, batch: int) -> int | None:
        """Gives the batch of the newest that verifies and has more batches; None without one."""

    def prune(self, keep: Collection[int]) -> Sequence[Place]:
        """Removes all but those of some batches; one that verifies always stays."""

    def clear(self, *, alone: bool = False) -> None:
        """Removes what killed processes left; all of it, where nobody else writes here."""


class Lock(Protocol):
    """What keeps other processes out of a run, as well as that can be done where it is."""

    def acquire(self) -> None:
        """Takes it; again, where it is held already.

        Raises:
            ResumeError: another process has it.
        """

    def require(self) -> None:
        """Makes sure that it is still held.

        Raises:
            ResumeError: another process has it now.
        """

    def release(self) -> None:
        """Gives it back."""


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
    """Gives where the files of a run are; makes nothing.

    Args:
        wanted: the folder or URL that was given.
        new_run_dir: the folder otherwise.

    Raises:
        UsageError: a package is missing that knows such URLs.
    """
    if isinstance(wanted, Url):
        from eventloop.checkpoint.lease import Lease
        from eventloop.checkpoint.remote import RemoteStore

        run_dir = local_folder(wanted)
        store = RemoteStore(wanted / FOLDER, run_dir / FOLDER)
        return Storage(run_dir, store, Lease(wanted, RunLock(run_dir)))
    run_dir = wanted or new_run_dir
    return Storage(run_dir, Store(run_dir / FOLDER), RunLock(run_dir) if wanted else None)


def local_folder(url: Url) -> Path:
    """Gives the local folder of a run at a URL: `runs/s3/charlm-3fa9c2d1`; always the same."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:8]
    name = _ODD.sub("-", url.name).strip("-.")[:60] or "run"
    return Path("runs", url.protocol, f"{name}-{digest}")


def local_copy(place: Place, storage: Storage, processes: Processes) -> Path:
    """Gives a checkpoint as a local folder, to all ranks; one on each machine downloads it.

    Raises:
        CheckpointError: it can't be used, or the store fails.
    """
    if isinstance(place, Path):
        return place
    from eventloop.checkpoint.remote import RemoteStore

    copies = storage.run_dir / (FOLDER if place.parent == storage.store.folder else DOWNLOADS)
    store = RemoteStore(place.parent, copies)
    problem = None
    if processes.local_rank == 0:
        try:
            store.download(place)
        except EventloopError as error:
            problem = error
    for one in processes.gathered(problem):
        if one is not None:
            raise one
    return store.copy_of(place)
