"""The checkpoints of a run: saved, found, replaced and removed, so that one is always whole.

Each is a folder `ba00001200` next to the others. It is written under a name that doesn't count, is
renamed when it is whole, and loses that name again before anything of it is removed. Which one is
the latest is found by looking. Whatever moment a process is killed at, a verified checkpoint is
there, if there was one before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from eventloop.checkpoint.leftovers import (
    REPLACED,
    UNDER_WAY,
    is_leftover,
    is_replaced,
    name_inside,
    new_id,
)
from eventloop.checkpoint.manifest import read_manifest
from eventloop.checkpoint.retention import newest_after, surplus
from eventloop.checkpoint.shares import telling, write_first, write_share, written_apart
from eventloop.checkpoint.verifying import (
    batch_of,
    examine,
    name_of,
    why_passed_over,
)
from eventloop.distributed.crew import ALONE
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.files.run_folder import check_folder
from eventloop.text import as_set
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.checkpoint.encoding import Nest
    from eventloop.checkpoint.manifest import Manifest
    from eventloop.distributed.crew import Crew

AnyPlace = TypeVar("AnyPlace", Path, Url)


@dataclass(frozen=True)
class Found(Generic[AnyPlace]):
    """A checkpoint that was found, or what looks like one.

    Attributes:
        path: its folder, or its URL.
        batch: how many batches the run had had.
        facts: what is known of it; empty where it can't be used.
        num_bytes: its size.
        damage: why it doesn't verify, or "".
    """

    path: AnyPlace
    batch: int
    facts: dict[str, Any]
    num_bytes: int
    damage: str

    @property
    def reason(self) -> str:
        """Why no run starts from it by itself: it doesn't verify, or its weights aren't finite."""
        return self.damage or why_passed_over(self.facts)


class Store:
    """The checkpoints in one folder.

    Args:
        folder: `RUN/checkpoints`; made by the first save. Where it isn't a folder, or is a link to one,
            every method raises `RunFolderError`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        batch: int,
        parts: Mapping[str, Nest],
        facts: Mapping[str, Any],
        crew: Crew = ALONE,
    ) -> Path:
        """Saves a checkpoint and gives its folder; when it returns, it would outlive a power failure.

        One of the same batch is replaced, or kept where it is whole and equal. What killed saves left
        behind is removed first.

        Args:
            batch: how many batches the run has had.
            parts, facts: as `format.write` takes them.
            crew: the ranks that write it, each what it holds; rank 0 the manifest, when all files
                are on the disk and have been read back.

        Raises:
            CheckpointError: something can't be saved, or the disk is full or broken; then nothing of
                it is left, and what was there before is as it was.
        """
        from eventloop.checkpoint.format import Draft  # imports torch, which finding does without

        target, drafts = self.folder / name_of(batch), []

        def prepare() -> None:
            drafts.append(Draft(parts, facts, batch, crew.rank, crew.world_size))
            if crew.rank == 0:
                self.clear()

        crew.run(prepare)
        (draft,) = drafts
        if crew.rank == 0:
            with telling(crew) as tell, draft.failing(target):  # which may refuse to begin
                return self.take_in(batch, lambda folder: write_first(draft, folder, crew, tell))
        write_share(draft, self.folder, crew)
        return target

    def take_in(self, batch: int, write: Callable[[Path], Manifest]) -> Path:
        """Adds a checkpoint that `write` fills; returns its place, or raises OSError, as `save`.

        Args:
            write: writes it into an empty folder and gives its manifest.
        """
        target = self.folder / name_of(batch)
        with self._under_way(target.name) as folder:
            manifest = write(folder)
            if not holds(target, manifest):
                try:
                    self._put_in_place(folder, target)
                except OSError:
                    if not holds(target, manifest):  # another machine may have put the same there
                        raise
        return target

    def shared_out(
        self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any], crew: Crew
    ) -> AbstractContextManager[Path]:
        """Writes what each rank of a crew holds; see `written_apart`."""
        from eventloop.checkpoint.format import Draft

        def prepare() -> Draft:
            self.clear()
            return Draft(parts, facts, batch, crew.rank, crew.world_size)

        return written_apart(prepare, lambda: self._under_way(name_of(batch)), crew)

    def found(self, *, digests: bool = False) -> list[Found[Path]]:
        """Returns what looks like a checkpoint, the newest first; the files may change meanwhile.

        Args:
            digests: whether all files are read and verified; otherwise only the manifests, and that
                the files are there in their sizes.
        """
        return [look_at(path, digests=digests) for path in self.paths()]

    def paths(self) -> list[Path]:
        """Returns all folders with the name of a checkpoint, the newest first.

        One that is being replaced comes after its successor.
        """
        named = [(batch_of(one.name), one) for one in self._listed()]
        ordered = [(batch, not is_replaced(one), one) for batch, one in named if batch is not None]
        return [one for _, _, one in sorted(ordered, reverse=True)]

    def latest(
        self, *, shards: bool = True, damage: Mapping[Path, str] | None = None
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Returns the newest checkpoint that verifies and is finite, and why newer ones can't be used.

        Looks at each from the newest on; nothing points to it.

        Args:
            shards: whether the files of slices are read, too; otherwise all ranks read a share each.
            damage: what these have found, by checkpoint.
        """
        refused: list[tuple[Path, str]] = []
        for path in self.paths():
            why = (damage or {}).get(path) or look_at(path, digests=True, shards=shards).reason
            if not why:
                return path, refused
            refused.append((path, why))
        return None, refused

    def newest_after(self, batch: int) -> int | None:
        """Returns the batch of the newest usable checkpoint that has more batches, if any."""
        return newest_after(batch, self.found(), self._is_usable)

    def prune(self, keep: Collection[int], safe: Path | None = None) -> list[Path]:
        """Removes all checkpoints but some and returns those removed; a usable one always stays.

        Where none of those to keep verifies and is finite, the newest that does stays, too.

        Args:
            keep: their batches.
            safe: one that is known to be usable, and needn't be read for that.

        Raises:
            CheckpointError: one can't be removed.
        """
        paths = self.paths()
        kept = [path for path in paths if batch_of(path.name) in keep]
        # What is being replaced is settled by the process that replaces it, or by `clear`.
        others = [path for path in paths if path not in kept and not is_replaced(path)]
        removed = surplus(kept, others, lambda path: path == safe or self._is_usable(path))
        for path in removed:
            self._remove(path)
        return removed

    def keep_only(self, batch: int) -> None:
        """Removes all checkpoints but one without looking at them; for a folder of copies.

        Raises:
            CheckpointError: one can't be removed.
        """
        for path in self.paths():
            if batch_of(path.name) != batch:
                self._remove(path)

    def clear(self, *, alone: bool = False) -> None:
        """Removes what killed processes left behind; puts back what one had been replacing.

        What can't be removed stays: it takes space, and does no harm.

        Args:
            alone: whether the caller knows that no other process, on any machine, writes here; then
                all that is under way is left over. Otherwise what another machine began is left
                alone for a day.
        """
        for folder in self._listed():
            with suppress(OSError, CheckpointError, RecursionError):  # of folders in folders
                if not is_leftover(folder, alone=alone):
                    continue
                if is_replaced(folder):
                    self._settle(folder)
                else:
                    disk.remove_tree(folder)

    # How

    @contextmanager
    def _under_way(self, name: str) -> Iterator[Path]:
        """Yields an empty folder that doesn't count; if it wasn't renamed, it is removed afterwards."""
        check_folder(self.folder)
        with new_id() as one:
            disk.make_folders(self.folder)
            folder = self.folder / f"{UNDER_WAY}{name}-{one}"
            try:
                disk.make_folder(folder)
                yield folder
            finally:
                with suppress(OSError):  # a failure before is the one to tell of
                    disk.remove_tree(folder)

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        """Renames a whole checkpoint into place; at any moment it or the one before is there."""
        replaced = self.folder / temporary.name.replace(UNDER_WAY, REPLACED, 1)
        if is_there := os.path.lexists(target):
            disk.rename(target, replaced)
        try:
            disk.rename(temporary, target)
        except BaseException:
            if is_there:
                disk.rename(replaced, target)
            raise
        disk.sync_folder(self.folder)
        if is_there:
            with suppress(OSError, CheckpointError):  # saved it is; the rest is left for `clear`
                self._remove(replaced)

    def _settle(self, replaced: Path) -> None:
        """Ends a replacement: the newer one stays, if it is whole."""
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
        """Removes a folder; it stops being a checkpoint before the first of its files is gone."""
        with new_id() as one:
            going = self.folder / f"{UNDER_WAY}{name_inside(path)}-{one}"
            try:
                disk.rename(path, going)
                disk.sync_folder(self.folder)
                disk.remove_tree(going)
            except OSError as error:
                raise CheckpointError(
                    f"the checkpoint {str(path)!r} can't be removed: {error.strerror}",
                    fix="look at its owner and rights, or remove it by hand",
                ) from error

    def _listed(self) -> list[Path]:
        check_folder(self.folder)
        try:
            return sorted(Path(one) for one in os.scandir(self.folder))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {str(self.folder)!r} can't be listed: {error.strerror}",
                fix=f"look at its owner and rights, or give another run, {as_set(run_dir='RUN')}",
            ) from error

    def _verifies(self, path: Path) -> bool:
        return not look_at(path, digests=True).damage

    def _is_usable(self, path: Path) -> bool:
        return not look_at(path, digests=True).reason


def look_at(path: Path, *, digests: bool, shards: bool = True) -> Found[Path]:
    """Returns whether a folder is a checkpoint that can be used; files may change meanwhile.

    Args:
        digests: whether all files are read and verified; otherwise only the manifest, and that the
            files are there in their sizes.
        shards: whether the files of slices are among those that are read.
    """
    batch = batch_of(path.name) or 0
    try:
        if path.is_symlink() or not path.is_dir():
            raise CorruptFileError("it is a link to somewhere else, or no folder")
        manifest = examine(path, digests=digests, shards=shards)
    except CorruptFileError as damage:
        return Found(path, batch, {}, 0, str(damage))
    return Found(path, manifest.batch or 0, manifest.known, manifest.num_bytes, "")


def holds(folder: Path, manifest: Manifest) -> bool:
    """Returns whether a folder has a whole checkpoint with the files and facts of a manifest."""
    if folder.is_symlink():
        return False
    try:
        there = read_manifest(folder)
        # Only then is it worth to read all of it.
        is_same = (there.files, there.facts) == (manifest.files, manifest.facts)
        return is_same and examine(folder).files == manifest.files
    except CorruptFileError:
        return False
