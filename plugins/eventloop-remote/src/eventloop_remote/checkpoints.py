"""The checkpoints of a run at a URL: a storage moves files, this module adds the guarantees.

Each is a folder `ba00001200`. It is written to the local disk before it is uploaded, by several ranks each
its own part, the manifest last: without one it is incomplete. It is verified after a download.
If it is saved again, it gets a new name, `ba00001200.1-ID`, and only then the old one is removed.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.storage import (
    ALONE,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    CheckpointError,
    CorruptFileError,
    Crew,
    FoundCheckpoint,
    Manifest,
    NewFile,
    Store,
    Url,
    batch_in,
    check_folder,
    checked_manifest,
    examine,
    holds,
    key_of,
    name_of,
    newest_after,
    parse_manifest,
    read_manifest,
    remove_each,
    surplus,
    why_passed_over,
)

if TYPE_CHECKING:
    from eventloop_remote.moving import RemoteFolder


class RemoteCheckpoints:
    """The checkpoints under a URL.

    Args:
        folder: `RUN/checkpoints`.
        remote: the same folder in the storage.
        copies: local folder for the checkpoint that was saved or downloaded last.
    """

    def __init__(self, folder: Url, remote: RemoteFolder, copies: Path) -> None:
        self.folder = folder
        self._remote = remote
        self._copies = Store(copies)
        # Checkpoints that this process uploaded or verified, so that they needn't be downloaded to verify.
        self._whole: set[str] = set()

    def save(
        self,
        batch: int,
        parts: Mapping[str, Any],
        facts: Mapping[str, Any],
        crew: Crew = ALONE,
    ) -> Url:
        """Saves a checkpoint and returns its URL; when it returns, the storage has all files.

        A checkpoint of the same batch is replaced, or kept if this process knows that it is complete and
        equal. Remains of killed saves are removed first.

        Args:
            batch, parts, facts: as in `Checkpoints.save`.
            crew: the ranks that write it. Several ranks each write and upload their part, from their own
                local folders, which are emptied afterwards; a single rank keeps a local copy.

        Raises:
            CheckpointError: something can't be saved, the disk is full, or the storage fails.
        """
        # Before this checkpoint is written: `clear` may download others into the same local folder.
        crew.run(self.clear if crew.rank == 0 else lambda: None)
        if crew.world_size > 1:
            with self._copies.shared_out(batch, parts, facts, crew) as share:
                return self._upload(batch, share, crew)
        copy = self._copies.save(batch, parts, facts)
        self._copies.keep_only(batch)
        return self._upload(batch, copy, crew)

    def found(self, *, digests: bool = False) -> list[FoundCheckpoint[Url]]:
        """Returns all checkpoints, possibly damaged, the newest first.

        Args:
            digests: whether to download and verify each, unless this process has verified or
                uploaded it; otherwise only manifests are read, and sizes compared.
        """
        while names := self._names():
            looks = [self._look_at(name, digests=digests) for name in names]
            # A running process may have removed some meanwhile; if it removed all, it has written others.
            existing = [look for look in looks if not look.damage or self.has(look.path.name)]
            if existing:
                return existing
        return []

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, damaged or not: whether it has a manifest."""
        # In stores that show a write in progress, the file is empty first.
        return name in self._whole or bool(self._remote.sizes(name).get(MANIFEST))

    def latest(
        self, *, shards: bool = True, damage: Mapping[Url, str] | None = None
    ) -> tuple[Url | None, list[tuple[Url, str]]]:
        """As `Checkpoints.latest`; downloads whole checkpoints, regardless of `shards`.

        Raises:
            CheckpointError: the storage fails: to begin earlier would be wrong then.
        """
        refused: list[tuple[Url, str]] = []
        names = self._names()
        for name in names:
            try:
                reason = (damage or {}).get(self.folder / name) or why_passed_over(
                    checked_manifest(self._copied(name)).known
                )
            except CorruptFileError as unlike:
                self._whole.discard(name)
                if not self.has(name):
                    continue  # another process has removed it
                reason = str(unlike)
            if not reason:
                return self.folder / name, refused
            refused.append((self.folder / name, reason))
        return (None, refused) if refused or not names else self.latest(damage=damage)

    def download(self, url: Url) -> Path:
        """Returns the local copy of a checkpoint, verified; downloads it unless it exists.

        Raises:
            CheckpointError: the checkpoint can't be used, or the storage fails.
        """
        try:
            return self._copied(url.name)
        except CorruptFileError as damage:
            self._whole.discard(url.name)
            raise CheckpointError(
                f"the checkpoint {str(url)!r} can't be used: {damage}",
                fix=damage.fix or "take another checkpoint",
            ) from damage

    def newest_after(self, batch: int) -> int | None:
        """Returns the batch of the newest usable checkpoint after a batch, if any."""
        return newest_after(batch, self.found(), lambda url: self._is_usable(url.name))

    def prune(self, keep: Collection[int], safe: Url | None = None) -> list[Url]:
        """As `Checkpoints.prune`; may download checkpoints to verify them."""
        names = self._names()
        to_keep = [name for name in names if batch_in(name) in keep]
        candidates = [name for name in names if name not in to_keep]
        removed = surplus(
            to_keep, candidates, lambda name: self.folder / name == safe or self._is_usable(name)
        )
        remove_each(removed, self._remove)
        return [self.folder / name for name in removed]

    def clear(self, *, alone: bool = False) -> None:
        """As `Checkpoints.clear`."""
        with suppress(CheckpointError):
            complete_names = []
            for name in self._listed():
                if self.has(name):
                    complete_names.append(name)
                else:
                    self._remove(name)
            for _, names_of_batch in itertools.groupby(complete_names, batch_in):
                self._settle(list(names_of_batch))

    # How

    def _names(self) -> list[str]:
        """Returns the names of all checkpoints that have a manifest, the newest first."""
        listed = self._listed()
        names = [name for name in listed if self.has(name)]
        return names if names or listed == self._listed() else self._names()

    def _listed(self) -> list[str]:
        """Returns all names that have the form of a checkpoint's name, the newest first."""
        named = [(key, name) for name in self._remote.names() if (key := key_of(name)) is not None]
        return [name for _, name in sorted(named, reverse=True)]

    def _upload(self, batch: int, folder: Path, crew: Crew) -> Url:
        """Uploads the files of every rank's folder, then the manifest of rank 0."""
        existing_names: list[str] = []

        def choose() -> tuple[str, bool]:
            if crew.rank:
                return "", False
            existing_names.extend(name for name in self._names() if batch_in(name) == batch)
            return self._name_for(batch, folder, existing_names, crew)

        chosen = crew.run(choose)
        name, is_new = crew.first(chosen[0] if chosen else ("", False))
        if not is_new:
            return self.folder / name
        try:
            crew.run(lambda: self._upload_files(name, folder))
            if crew.rank == 0:
                self._require_sizes(name, read_manifest(folder))
                self._remote.upload(name, MANIFEST, folder / MANIFEST)
        except BaseException:
            if crew.rank == 0:
                with suppress(CheckpointError):  # report the first failure
                    self._remove(name)
            raise
        if crew.rank == 0:
            self._whole.add(name)
            for older in existing_names:
                with suppress(CheckpointError):  # the checkpoint is saved; `clear` removes the rest
                    self._remove(older)
        return self.folder / name

    def _name_for(
        self, batch: int, folder: Path, existing_names: Sequence[str], crew: Crew
    ) -> tuple[str, bool]:
        """Returns the name that a checkpoint gets, and whether it has to be uploaded.

        Args:
            there: names of the existing checkpoints of its batch, the newest first.
        """
        if (
            existing_names
            and existing_names[0] in self._whole
            and self._is_equal(existing_names[0], read_manifest(folder))
        ):
            return existing_names[0], False
        if not existing_names and crew.world_size == 1:
            return name_of(batch), True
        # A new name, because a disconnected rank may still write to the old one.
        number = (key_of(existing_names[0]) or (0, 0))[1] if existing_names else 0
        return f"{name_of(batch)}.{number + 1}-{secrets.token_hex(4)}", True

    def _upload_files(self, name: str, folder: Path) -> None:
        for file in sorted(path.name for path in folder.iterdir()):
            if file != MANIFEST:
                self._remote.upload(name, file, folder / file)

    def _require_sizes(self, name: str, manifest: Manifest) -> None:
        try:
            _compare(self._remote.sizes(name), manifest)
        except CorruptFileError as damage:
            raise CheckpointError(
                f"{self.folder / name} isn't what was uploaded: {damage}",
                fix="look whether another process writes there",
            ) from damage

    def _look_at(self, name: str, *, digests: bool) -> FoundCheckpoint[Url]:
        url = self.folder / name
        try:
            is_read = digests and name not in self._whole
            manifest = self._verified(name) if is_read else self._manifest(name)[0]
            return FoundCheckpoint(url, manifest.batch or 0, manifest.known, manifest.num_bytes, "")
        except CorruptFileError as damage:
            self._whole.discard(name)
            return FoundCheckpoint(url, batch_in(name) or 0, {}, 0, str(damage))

    def _is_usable(self, name: str) -> bool:
        return not self._look_at(name, digests=True).reason

    def _is_equal(self, name: str, manifest: Manifest) -> bool:
        try:
            existing_manifest, _ = self._manifest(name)
        except CorruptFileError:
            return False
        return (existing_manifest.files, existing_manifest.facts) == (
            manifest.files,
            manifest.facts,
        )

    def _settle(self, names_of_batch: list[str]) -> None:
        """Leaves, of the checkpoints of one batch, the newest that verifies."""
        if len(names_of_batch) == 1:
            return
        looked = ((name, self._look_at(name, digests=True).damage) for name in names_of_batch)
        safe = next((name for name, damage in looked if not damage), None)
        for name in names_of_batch:
            if safe not in (name, None):
                self._remove(name)

    def _remove(self, name: str) -> None:
        self._whole.discard(name)
        self._remote.remove(name)

    def _manifest(self, name: str) -> tuple[Manifest, bytes]:
        """Reads a manifest, and compares the sizes of all files with it.

        Raises:
            CorruptFileError: it can't be used, or a file is missing or has the wrong size.
        """
        if batch_in(name) is None:
            raise CorruptFileError("that isn't the name of a checkpoint, such as ba00001200")
        sizes = self._remote.sizes(name)
        try:
            num_bytes = sizes.get(MANIFEST) or 0
            if num_bytes > MAX_MANIFEST_BYTES:
                raise CorruptFileError(f"it has {num_bytes:,} bytes")
            data = self._remote.read(name, MANIFEST, num_bytes) if num_bytes else b""
            manifest = parse_manifest(data)
            if manifest.batch != batch_in(name):
                raise CorruptFileError(f"it belongs to batch {manifest.batch}")
        except FileNotFoundError:
            raise CorruptFileError(f"{MANIFEST}: it isn't there any more") from None
        except CorruptFileError as damage:
            raise damage.of(MANIFEST) from damage
        _compare(sizes, manifest)
        return manifest, data

    def _copied(self, name: str) -> Path:
        """Returns a verified local copy; downloads it if there is none.

        Raises:
            CorruptFileError: the checkpoint in the storage doesn't verify.
        """
        manifest, _ = self._manifest(name)
        check_folder(self._copies.folder)
        copy = self._copies.folder / name_of(manifest.batch or 0)
        if not holds(copy, manifest):
            self._verified(name)
        return copy

    def _verified(self, name: str) -> Manifest:
        """Downloads a checkpoint and verifies it, even if there is a local copy.

        Raises:
            CorruptFileError: the checkpoint doesn't verify.
        """
        manifest, data = self._manifest(name)
        batch = manifest.batch or 0
        try:
            self._copies.clear()
            self._copies.keep_only(batch)
            self._copies.take_in(batch, lambda folder: self._fill(folder, name, manifest, data))
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / name} can't be copied to {str(self._copies.folder)!r}: "
                f"{error.strerror or error}",
                fix="free space there, or start in another folder",
            ) from error
        self._whole.add(name)
        return manifest

    def _fill(self, folder: Path, name: str, manifest: Manifest, data: bytes) -> Manifest:
        for file, expected_file in manifest.files.items():
            try:
                self._remote.download(name, file, folder / file, expected_file.num_bytes)
            except FileNotFoundError:
                raise CorruptFileError(f"{file}: it isn't there any more") from None
        with NewFile(folder / MANIFEST) as target:
            target.write(data)
        return examine(folder)


def _compare(sizes: Mapping[str, int | None], manifest: Manifest) -> None:
    """Raises CorruptFileError unless each file exists with the size in the manifest."""
    for file, expected_file in manifest.files.items():
        if sizes.get(file) != expected_file.num_bytes:
            problem = "it isn't there" if file not in sizes else f"it has {sizes[file]} bytes"
            raise CorruptFileError(
                f"{file}: {problem}, {MANIFEST} says {expected_file.num_bytes:,} bytes"
            )
