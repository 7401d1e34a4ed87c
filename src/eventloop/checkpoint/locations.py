"""Where checkpoints are: in a run's folder, at a URL of a storage, or where a path refers to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from eventloop.checkpoint.manifest import BEGINNING, MANIFEST
from eventloop.checkpoint.run_lock import Lock, RunLock
from eventloop.checkpoint.store import AnyPlace, Checkpoints, FoundCheckpoint, Store, look_at
from eventloop.checkpoint.verifying import batch_of
from eventloop.errors import (
    CheckpointError,
    EventloopError,
    Note,
    PluginError,
    UsageError,
    closest_at,
    first_of,
)
from eventloop.files.disk import CorruptFileError, OldFile
from eventloop.files.run_folder import local_folder
from eventloop.plugin.discover import extensions
from eventloop.plugin.load import imported
from eventloop.plugin.name_problems import extension_problems
from eventloop.urls import Place, Url

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.records import Found

DOWNLOADS = "downloads"  # of checkpoints of other runs
FOLDER = "checkpoints"  # of a run
STORAGE_GROUP = "eventloop.storage"
ANY = "*"  # the name of an entry point for all schemes that no other one names
# What fsspec, which is behind eventloop-remote, has no support for by itself.
_DRIVERS = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "s3": "s3fs",
    "sftp": "paramiko",
}


class UrlCheckpoints(Checkpoints[Url], Protocol):
    """The checkpoints under a URL; `key_of` parses their names.

    A failure raises `CheckpointError`: a storage that doesn't respond must not look like an empty
    one.
    """

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint with this name, damaged or not."""

    def download(self, url: Url) -> Path:
        """Returns the verified local copy of a checkpoint, downloading it if needed.

        Raises:
            CheckpointError: it can't be used, or the storage fails.
        """


@runtime_checkable
class UrlStorage(Protocol):
    """The object that an entry point of `eventloop.storage` names: an instance, or a module."""

    def checkpoints(self, folder: Url, copies: Path) -> UrlCheckpoints:
        """Returns the checkpoints under a URL, which can be empty.

        Args:
            folder: `RUN/checkpoints`.
            copies: the local folder for the last checkpoint saved or downloaded.

        Raises:
            UsageError: the URL can't be opened; a package may be missing.
        """

    def lock(self, run: Url, local: Lock) -> Lock:
        """Returns a lock that keeps other processes from training the run at a URL.

        Args:
            run: the URL of the run.
            local: the lock for this machine. A storage without locks returns it; other locks also
                acquire and release it.
        """


@dataclass(frozen=True)
class Storage:
    """Where the files of a run are: a local folder for all but checkpoints, which can be elsewhere.

    There is no lock in a new folder.
    """

    run_dir: Path
    store: Store | UrlCheckpoints
    lock: Lock | None


def storage_of(wanted: Place | None, new_run_dir: Path) -> Storage:
    """Returns where the files of a run are, in `wanted` or else `new_run_dir`; creates nothing."""
    if isinstance(wanted, Url):
        run_dir = local_folder(wanted)
        storage = storage_for(wanted)
        store = storage.checkpoints(wanted / FOLDER, run_dir / FOLDER)
        return Storage(run_dir, store, storage.lock(wanted, RunLock(run_dir)))
    run_dir = wanted or new_run_dir
    return Storage(run_dir, Store(run_dir / FOLDER), RunLock(run_dir) if wanted else None)


def storage_for(url: Url) -> UrlStorage:
    """Imports the storage for a URL; raises UsageError or PluginError without a usable one."""
    installed = extensions(STORAGE_GROUP)
    named = [one for one in installed if one.name.lower() == url.protocol]
    able = named or [one for one in installed if one.name == ANY]
    if not able:
        raise _none_for(url, installed)
    if (problem := extension_problems(installed, {}).get(able[0])) is not None:
        raise problem
    return imported_storage(able[0])


def imported_storage(found: Found) -> UrlStorage:
    """Imports the storage that an entry point names; raises PluginError if it isn't one."""
    storage = imported(found)
    if not isinstance(storage, UrlStorage):
        raise PluginError(
            f"{found.entry_point.value} isn't a storage: it lacks `checkpoints` or `lock`",
            plugin=found.origin,
            fix="name an object or a module with both functions of eventloop.storage.UrlStorage",
        )
    blamed: Any = _Blamed(storage, found.origin)
    return cast("UrlStorage", blamed)


class _Blamed:
    """Wraps a storage, or the checkpoints in it, and adds a note to its unexpected exceptions."""

    def __init__(self, blamed: UrlStorage | UrlCheckpoints, origin: str) -> None:
        self._blamed = blamed
        self._origin = origin

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._blamed, name)

        def called(*args: Any, **named: Any) -> Any:
            try:
                result = value(*args, **named)
            except (EventloopError, OSError):  # as a storage may
                raise
            except Exception as error:
                text = f"raised by the storage {self._origin} in {name}"
                error.add_note(Note(text, "origin"))
                raise
            return _Blamed(result, self._origin) if name == "checkpoints" else result

        return value if name == "folder" else called


def _none_for(url: Url, installed: Sequence[Found]) -> UsageError:
    others = ", ".join(one.origin for one in installed)
    driver = _DRIVERS.get(url.protocol, "")
    return UsageError(
        f"{url.protocol}:// needs a storage package, and "
        + (f"none that is installed knows it: {others}" if others else "none is installed"),
        fix=f"python -m pip install eventloop-remote {driver}".rstrip(),
    )


def local_copy(place: Place, storage: Storage, processes: Processes) -> Path:
    """Returns the local folder of a checkpoint on all ranks; one of each machine downloads it."""
    if isinstance(place, Path):
        return place
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
    own = path.resolve() if path.is_symlink() else path
    inside = path / FOLDER
    if _is_checkpoint(path):
        return [own]
    return Store(inside if os.path.lexists(inside) else own).paths()


def best_among(found: Iterable[FoundCheckpoint[AnyPlace]]) -> FoundCheckpoint[AnyPlace] | None:
    """Returns the checkpoint of the best evaluation, which the newest one, the first, names."""
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
        paths = require_checkpoints(path)
        refused = []
        if len(paths) == 1:  # reading it reports what is wrong with it
            return paths[0], []
        for one in paths:
            if not (found := look_at(one, digests=True)).reason:
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
    """Returns the checkpoints that a path refers to; raises UsageError if there is none."""
    if not (paths := checkpoints_at(path)):
        raise UsageError(
            why_none(path), fix="name the folder of a run that has saved, or that of a checkpoint"
        )
    return paths


def why_none(path: Path) -> str:
    """Returns why a folder has no checkpoints, and which runs inside it have some."""
    runs = sorted((one.parent.name for one in path.glob(f"*/{FOLDER}")), reverse=True)
    if not runs:
        return f"there are no checkpoints in {str(path)!r}"
    named = first_of(map(repr, runs))
    return f"there are no checkpoints in {str(path)!r} itself, but it has the runs {named}"


def _is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint, by its name or content."""
    if batch_of(path.name) is not None:
        return True
    try:
        with OldFile(path / MANIFEST) as file:
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
    return UsageError(
        f"there is no folder {str(path)!r}{closest_at(path)}",
        fix="name the folder of a run, `runs/digits/20260131-120000-3fa9` say, or of a checkpoint",
    )
