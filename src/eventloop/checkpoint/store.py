"""Saves, finds, replaces and removes the checkpoints of a run, so that one is complete at any moment.

A checkpoint is a folder such as `ba00001200`. It is written under a temporary name, renamed when it
is complete, and renamed again before any of its files is removed. No file points to the latest
checkpoint. Once a run has a checkpoint that verifies, it still has one after the process is killed at
any moment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from eventloop.checkpoint.retention import (
    REPLACED,
    UNDER_WAY,
    is_leftover,
    is_replaced,
    name_inside,
    new_id,
    newest_after,
    remove_each,
    surplus,
)
from eventloop.checkpoint.verifying import batch_of, examine, holds, name_of, why_passed_over
from eventloop.distributed.checkpoint_crew import ALONE
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.files.run_folder import check_folder
from eventloop.fixes import as_set
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.checkpoint.encoding import Nest
    from eventloop.checkpoint.manifest import FileFacts, Manifest
    from eventloop.distributed.checkpoint_crew import Crew

AnyPlace = TypeVar("AnyPlace", Path, Url)


@dataclass(frozen=True)
class FoundCheckpoint(Generic[AnyPlace]):
    """A folder or URL that looks like a checkpoint.

    Attributes:
        path: the folder or URL.
        batch: the run's batch count.
        facts: the description; empty if the checkpoint is damaged.
        num_bytes: the size of its files.
        damage: the reason why it doesn't verify, or "".
    """

    path: AnyPlace
    batch: int
    facts: dict[str, Any]
    num_bytes: int
    damage: str

    @property
    def reason(self) -> str:
        """Why a run can't resume from it automatically: damage, or weights that aren't finite."""
        return self.damage or why_passed_over(self.facts)


class Checkpoints(Protocol[AnyPlace]):
    """The checkpoints of a run, in a folder or at a URL.

    Attributes:
        folder: `RUN/checkpoints`.
    """

    folder: AnyPlace

    def save(
        self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any], crew: Crew = ALONE
    ) -> AnyPlace:
        """Saves a checkpoint and returns its path or URL. All files are synced to disk by then.

        A checkpoint of the same batch is replaced, unless it is complete and equal. Leftovers of
        killed saves are removed first.

        Args:
            batch: the run's batch count.
            parts, facts: as for `write_checkpoint`.
            crew: the ranks that write the checkpoint, each its own files; rank 0 adds the manifest
                when all files have been synced and read back.

        Raises:
            CheckpointError: a value can't be saved, or the disk is full or fails. No files are left
                behind, and earlier checkpoints are unchanged.
        """

    def found(self, *, digests: bool = False) -> list[FoundCheckpoint[AnyPlace]]:
        """Returns everything that looks like a checkpoint, the newest first.

        Other processes may change files in the meantime.

        Args:
            digests: whether to read and verify all files; otherwise only the manifests and the
                files' sizes are checked.
        """

    def latest(
        self, *, shards: bool = True, damage: Mapping[AnyPlace, str] | None = None
    ) -> tuple[AnyPlace | None, list[tuple[AnyPlace, str]]]:
        """Returns the newest usable checkpoint, and (checkpoint, reason) for each newer one.

        Args:
            shards: whether to also read the files of slices; False if the ranks have read them.
            damage: the damage that the ranks have found, by checkpoint.
        """

    def newest_after(self, batch: int) -> int | None:
        """Returns the batch count of the newest usable checkpoint after `batch`, if any."""

    def prune(self, keep: Collection[int], safe: AnyPlace | None = None) -> list[AnyPlace]:
        """Removes checkpoints, always keeping a usable one; returns the removed checkpoints.

        If no checkpoint in `keep` is usable, the newest usable checkpoint is kept, too.

        Args:
            keep: the batch counts of the checkpoints to keep.
            safe: a checkpoint that is known to be usable, so it isn't read again.

        Raises:
            CheckpointError: a checkpoint can't be removed; all others were.
        """

    def clear(self, *, alone: bool = False) -> None:
        """Removes leftovers of killed processes; restores a checkpoint that was being replaced.

        A leftover that can't be removed is ignored, because it only takes space.

        Args:
            alone: whether the caller knows that no other process, on any machine, writes here. Then
                all temporary folders are leftovers. Otherwise, temporary folders of other machines
                are leftovers only after a day.
        """


class Store:
    """The checkpoints in one folder; see `Checkpoints`.

    Args:
        folder: `RUN/checkpoints`, created by the first save. If it is a link or not a folder,
            every method raises `RunFolderError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any], crew: Crew = ALONE
    ) -> Path:
        with self._written(batch, parts, facts, crew, own_folders=False) as target:
            return target

    def shared_out(
        self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any], crew: Crew
    ) -> AbstractContextManager[Path]:
        """Writes each rank's files into its own temporary folder, which other ranks needn't see.

        Yields:
            This rank's folder; rank 0's folder also has the manifest of all ranks' files.
        """
        return self._written(batch, parts, facts, crew, own_folders=True)

    def take_in(self, batch: int, write: Callable[[Path], Manifest]) -> Path:
        """Adds a checkpoint and returns its path.

        Args:
            batch: the run's batch count.
            write: writes the files into the given folder, and returns the manifest.

        Raises:
            CheckpointError, OSError: as for `save`.
        """
        with self._under_way(name_of(batch)) as folder:
            self._settle_in(folder, write(folder))
        return self.folder / name_of(batch)

    def found(self, *, digests: bool = False) -> list[FoundCheckpoint[Path]]:
        return [look_at(path, digests=digests) for path in self.paths()]

    def paths(self) -> list[Path]:
        """Returns all folders named like a checkpoint, the newest first.

        A checkpoint that is being replaced comes after its successor.
        """
        candidates = [(batch_of(path.name), path) for path in self._listed()]
        ordered = [
            (batch, not is_replaced(path), path) for batch, path in candidates if batch is not None
        ]
        return [path for _, _, path in sorted(ordered, reverse=True)]

    def latest(
        self, *, shards: bool = True, damage: Mapping[Path, str] | None = None
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        refused: list[tuple[Path, str]] = []
        for path in self.paths():
            reason = (damage or {}).get(path) or look_at(path, digests=True, shards=shards).reason
            if not reason:
                return path, refused
            refused.append((path, reason))
        return None, refused

    def newest_after(self, batch: int) -> int | None:
        return newest_after(batch, self.found(), self._is_usable)

    def prune(self, keep: Collection[int], safe: Path | None = None) -> list[Path]:
        paths = self.paths()
        staying = [path for path in paths if batch_of(path.name) in keep]
        # A checkpoint that is being replaced is left to the process that replaces it, or to `clear`.
        removable = [path for path in paths if path not in staying and not is_replaced(path)]
        removed = surplus(staying, removable, lambda path: path == safe or self._is_usable(path))
        remove_each(removed, self._remove)
        return removed

    def keep_only(self, batch: int) -> None:
        """Removes all checkpoints except one without reading them; for a folder of copies."""
        for path in self.paths():
            if batch_of(path.name) != batch:
                self._remove(path)

    def clear(self, *, alone: bool = False) -> None:
        for folder in self._listed():
            with suppress(OSError, CheckpointError, RecursionError):  # for deeply nested folders
                if not is_leftover(folder, alone=alone):
                    continue
                if is_replaced(folder):
                    self._settle(folder)
                else:
                    disk.remove_tree(folder)

    # How

    @contextmanager
    def _written(
        self,
        batch: int,
        parts: Mapping[str, Nest],
        facts: Mapping[str, Any],
        crew: Crew,
        *,
        own_folders: bool,
    ) -> Iterator[Path]:
        """Writes a checkpoint, each rank its own files; a step that fails on one rank fails on all.

        Args:
            own_folders: whether each rank has its own folder. Otherwise all ranks write into rank 0's
                folder, which becomes the checkpoint.
        """
        # Imports torch, which a command that only lists checkpoints doesn't need.
        from eventloop.checkpoint.checkpoint_files import Draft

        target = self.folder / name_of(batch)
        begun: list[tuple[Draft, Path]] = []
        with ExitStack() as folders:

            def begin() -> None:
                draft = Draft(parts, facts, batch, crew.rank, crew.world_size)
                folder = target
                makes_folder = own_folders or crew.rank == 0
                if makes_folder:
                    self.clear()
                with draft.failing(target):
                    disk.require_space(target, draft.num_bytes)
                    if makes_folder:
                        folder = folders.enter_context(self._under_way(target.name))
                begun.append((draft, folder))

            crew.run(begin)
            ((draft, folder),) = begun
            if not own_folders:
                folder = self.folder / crew.first(folder.name)

            def write() -> dict[str, FileFacts]:
                with draft.failing(target):
                    return draft.write_files(folder)

            files = {
                name: file_facts for share in crew.run(write) for name, file_facts in share.items()
            }

            def finish() -> None:
                if crew.rank == 0:
                    with draft.failing(target):
                        manifest = draft.write_manifest(folder, files)
                        if not own_folders:
                            self._settle_in(folder, manifest)

            crew.run(finish)
            yield folder if own_folders else target

    @contextmanager
    def _under_way(self, name: str) -> Iterator[Path]:
        """Yields an empty temporary folder; it is removed afterwards, unless it was renamed."""
        check_folder(self.folder)
        with new_id() as folder_id:
            disk.make_folders(self.folder)
            folder = self.folder / f"{UNDER_WAY}{name}-{folder_id}"
            try:
                disk.make_folder(folder)
                yield folder
            finally:
                with suppress(OSError):  # must not hide an earlier failure
                    disk.remove_tree(folder)

    def _settle_in(self, temporary: Path, manifest: Manifest) -> None:
        """Renames a complete checkpoint, unless an equal checkpoint has that name already.

        At any moment, the new checkpoint or its predecessor exists.
        """
        target = self.folder / name_inside(temporary)
        if holds(target, manifest):
            return
        try:
            self._put_in_place(temporary, target)
        except OSError:
            if not holds(target, manifest):  # another machine may have saved an equal one
                raise

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        replaced = self.folder / temporary.name.replace(UNDER_WAY, REPLACED, 1)
        if replaces := os.path.lexists(target):
            disk.rename(target, replaced)
        try:
            disk.rename(temporary, target)
        except BaseException:
            if replaces:
                disk.rename(replaced, target)
            raise
        disk.sync_folder(self.folder)
        if replaces:
            # The checkpoint is saved; a predecessor that can't be removed is left to `clear`.
            with suppress(OSError, CheckpointError):
                self._remove(replaced)

    def _settle(self, replaced: Path) -> None:
        """Finishes a replacement: keeps the newer checkpoint if it is complete."""
        target = self.folder / name_inside(replaced)
        if self._verifies(target):
            self._remove(replaced)
            return
        if os.path.lexists(target) and self._verifies(replaced):
            self._remove(target)
        if not os.path.lexists(target):
            disk.rename(replaced, target)
            disk.sync_folder(self.folder)
            return
        self._remove(replaced)

    def _remove(self, path: Path) -> None:
        """Removes a folder, after renaming it so that it no longer counts as a checkpoint."""
        with new_id() as folder_id:
            removed = self.folder / f"{UNDER_WAY}{name_inside(path)}-{folder_id}"
            try:
                disk.rename(path, removed)
                disk.sync_folder(self.folder)
                disk.remove_tree(removed)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {str(path)!r} can't be removed: {error.strerror}",
                    fix="check its owner and permissions, or remove it by hand",
                ) from error

    def _listed(self) -> list[Path]:
        check_folder(self.folder)
        try:
            return sorted(Path(entry) for entry in os.scandir(self.folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {str(self.folder)!r} can't be listed: {error.strerror}",
                fix="check its owner and permissions, or set another run, " + as_set(run_dir="RUN"),
            ) from error

    def _verifies(self, path: Path) -> bool:
        return not look_at(path, digests=True).damage

    def _is_usable(self, path: Path) -> bool:
        return not look_at(path, digests=True).reason


def look_at(path: Path, *, digests: bool, shards: bool = True) -> FoundCheckpoint[Path]:
    """Examines a folder, see `examine`; another process may be changing it."""
    batch = batch_of(path.name) or 0
    try:
        if path.is_symlink() or not path.is_dir():
            raise CorruptFileError("it is a link, or not a folder")
        manifest = examine(path, digests=digests, shards=shards)
    except CorruptFileError as damage:
        return FoundCheckpoint(path, batch, {}, 0, str(damage))
    return FoundCheckpoint(path, manifest.batch or 0, manifest.known, manifest.num_bytes, "")
