"""The location of checkpoints: in a run's folder, at a URL, or at a path that the user names."""

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

DOWNLOADS = "downloads"  # the folder for downloaded checkpoints of other runs
FOLDER = "checkpoints"  # the folder for a run's checkpoints
STORAGE_GROUP = "eventloop.storage"
ANY = "*"  # the name of an entry point for all schemes without their own entry point
# Packages that fsspec, on which eventloop-remote is built, needs for these schemes.
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

    A failure raises `CheckpointError`: a storage that doesn't respond must not look empty.
    """

    def has(self, name: str) -> bool:
        """Returns whether a checkpoint with this name exists, damaged or not."""

    def download(self, url: Url) -> Path:
        """Returns the verified local copy of a checkpoint, downloading it if needed.

        Raises:
            CheckpointError: the checkpoint can't be used, or the storage fails.
        """


@runtime_checkable
class UrlStorage(Protocol):
    """The object that an entry point of `eventloop.storage` names: an instance, or a module."""

    def checkpoints(self, folder: Url, copies: Path) -> UrlCheckpoints:
        """Returns the checkpoints under a URL; there may be none.

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
    """The location of a run's files.

    Attributes:
        run_dir: the local folder for all files except checkpoints.
        store: the checkpoints, which can be at a URL.
        lock: None for a new folder, which no other process can know.
    """

    run_dir: Path
    store: Store | UrlCheckpoints
    lock: Lock | None


def storage_of(requested: Place | None, new_run_dir: Path) -> Storage:
    """Returns the location of a run's files: `requested`, or else `new_run_dir`. Creates nothing."""
    if isinstance(requested, Url):
        run_dir = local_folder(requested)
        storage = storage_for(requested)
        store = storage.checkpoints(requested / FOLDER, run_dir / FOLDER)
        return Storage(run_dir, store, storage.lock(requested, RunLock(run_dir)))
    run_dir = requested or new_run_dir
    return Storage(run_dir, Store(run_dir / FOLDER), RunLock(run_dir) if requested else None)


def storage_for(url: Url) -> UrlStorage:
    """Imports the storage for a URL.

    Raises:
        UsageError: no installed package supports the URL's scheme.
        PluginError: the package's entry point can't be used.
    """
    installed = extensions(STORAGE_GROUP)
    matching = [extension for extension in installed if extension.name.lower() == url.protocol]
    candidates = matching or [extension for extension in installed if extension.name == ANY]
    if not candidates:
        raise _none_for(url, installed)
    if (problem := extension_problems(installed, {}).get(candidates[0])) is not None:
        raise problem
    return imported_storage(candidates[0])


def imported_storage(extension: Found) -> UrlStorage:
    """Imports the storage that an entry point names.

    Raises:
        PluginError: the object can't be imported, or isn't a storage.
    """
    storage = imported(extension)
    if not isinstance(storage, UrlStorage):
        raise PluginError(
            f"{extension.entry_point.value} isn't a storage: it lacks `checkpoints` or `lock`",
            plugin=extension.origin,
            fix="name an object or a module with both functions of eventloop.storage.UrlStorage",
        )
    blamed: Any = _Blamed(storage, extension.origin)
    return cast("UrlStorage", blamed)


class _Blamed:
    """Wraps a storage, or the checkpoints in it, and adds a note to its unexpected exceptions."""

    def __init__(self, target: UrlStorage | UrlCheckpoints, origin: str) -> None:
        self._blamed = target
        self._origin = origin

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._blamed, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                result = value(*args, **kwargs)
            except (EventloopError, OSError):  # a storage may raise these
                raise
            except Exception as error:
                text = f"raised by the storage {self._origin} in {name}"
                error.add_note(Note(text, "origin"))
                raise
            return _Blamed(result, self._origin) if name == "checkpoints" else result

        return value if name == "folder" else called


def _none_for(url: Url, installed: Sequence[Found]) -> UsageError:
    other_storages = ", ".join(extension.origin for extension in installed)
    driver = _DRIVERS.get(url.protocol, "")
    return UsageError(
        f"{url.protocol}:// needs a storage package, and "
        + (
            f"none that is installed knows it: {other_storages}"
            if other_storages
            else "none is installed"
        ),
        fix=f"python -m pip install eventloop-remote {driver}".rstrip(),
    )


def local_copy(place: Place, storage: Storage, processes: Processes) -> Path:
    """Returns the local folder of a checkpoint; a rank per machine downloads it. Collective."""
    if isinstance(place, Path):
        return place
    outcome: Path | EventloopError | None = None
    if processes.local_rank == 0:
        copies = storage.run_dir / (FOLDER if place.parent == storage.store.folder else DOWNLOADS)
        try:
            outcome = storage_for(place).checkpoints(place.parent, copies).download(place)
        except EventloopError as error:
            outcome = error
    outcomes = processes.all_gather(outcome)
    for rank_outcome in outcomes:
        if isinstance(rank_outcome, EventloopError):
            raise rank_outcome
    copy: Path = outcomes[processes.rank - processes.local_rank]
    return copy


def checkpoints_at(path: Path) -> list[Path]:
    """Returns the checkpoints that a path refers to, the newest first.

    Args:
        path: a run's folder, its `checkpoints`, or a checkpoint.

    Raises:
        UsageError: the folder doesn't exist.
        CheckpointError: the folder can't be listed.
    """
    if not path.is_dir():
        raise _no_folder(path)
    # The user's own path may be a link, but not the entries in a run's folder, which may come from
    # an untrusted source.
    resolved_path = path.resolve() if path.is_symlink() else path
    checkpoints_folder = path / FOLDER
    if _is_checkpoint(path):
        return [resolved_path]
    return Store(
        checkpoints_folder if os.path.lexists(checkpoints_folder) else resolved_path
    ).paths()


def best_among(found: Iterable[FoundCheckpoint[AnyPlace]]) -> FoundCheckpoint[AnyPlace] | None:
    """Returns the checkpoint of the best evaluation, as the newest usable checkpoint names it.

    Args:
        found: the checkpoints, the newest first.
    """
    usable = [checkpoint for checkpoint in found if not checkpoint.reason]
    best = next(
        (checkpoint.facts["best"] for checkpoint in usable if "best" in checkpoint.facts), None
    )
    return next((checkpoint for checkpoint in usable if checkpoint.batch == best), None)


def checkpoint_at(path: Path) -> tuple[Path, list[FoundCheckpoint[Path]]]:
    """Returns the checkpoint that a path refers to; for a run, the newest usable one.

    Returns:
        The checkpoint, and the newer checkpoints of the run that can't be used.

    Raises:
        UsageError: there is no checkpoint.
        CheckpointError: every checkpoint is damaged or has weights that aren't finite.
    """
    refused: list[FoundCheckpoint[Path]] = []
    paths: list[Path] = []
    # Listed again if checkpoints have disappeared: the run may be active and remove surplus ones.
    while not paths or len(refused) < len(paths):
        paths = require_checkpoints(path)
        refused = []
        if len(paths) == 1:  # reading it will report any damage
            return paths[0], []
        for checkpoint_path in paths:
            if not (checkpoint := look_at(checkpoint_path, digests=True)).reason:
                return checkpoint_path, refused
            if os.path.lexists(checkpoint_path):
                refused.append(checkpoint)
    raise unusable(
        path, [(checkpoint_path.path, checkpoint_path.reason) for checkpoint_path in refused]
    )


def unusable(place: Place, refused: Sequence[tuple[Place, str]]) -> CheckpointError:
    """Returns the error for checkpoints that are all unusable, each with the reason."""
    listed = "\n    ".join(
        f"{checkpoint_path.name}: {reason}" for checkpoint_path, reason in refused
    )
    location = f"in {str(place)!r}" if isinstance(place, Path) else f"at {place}"
    return CheckpointError(
        f"none of the {len(refused)} checkpoints {location} can be used"
        if len(refused) > 1
        else f"the only checkpoint {location} can't be used",
        reasons=f"\n    {listed}",
        fix="restore a checkpoint from a copy, or begin a new run in another run_dir",
    )


def require_checkpoints(path: Path) -> list[Path]:
    """Returns the checkpoints that a path refers to; raises UsageError if there are none."""
    if not (paths := checkpoints_at(path)):
        raise UsageError(
            why_none(path), fix="name the folder of a run with checkpoints, or of a checkpoint"
        )
    return paths


def why_none(path: Path) -> str:
    """Returns the message for a folder without checkpoints; it lists runs inside it that have some."""
    runs = sorted((folder.parent.name for folder in path.glob(f"*/{FOLDER}")), reverse=True)
    if not runs:
        return f"there are no checkpoints in {str(path)!r}"
    run_names = first_of(map(repr, runs))
    return f"there are no checkpoints in {str(path)!r} itself, but it has the runs {run_names}"


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
        is_in_checkpoint = _is_checkpoint(path.parent)
        return UsageError(
            f"{str(path)!r} is a file, but runs and checkpoints are folders",
            fix=f"name the folder: {str(path.parent)!r}" if is_in_checkpoint else "name a folder",
        )
    return UsageError(
        f"there is no folder {str(path)!r}{closest_at(path)}",
        fix="name the folder of a run, such as `runs/digits/20260131-120000-3fa9`, or of a checkpoint",
    )
