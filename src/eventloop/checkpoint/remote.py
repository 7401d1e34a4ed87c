"""The checkpoints of a run in a store of objects, which has no locks and can't rename.

Each is a folder `ba00001200`, as on a disk. Its files are uploaded one by one, the manifest last:
without one it doesn't count. One that is saved again goes beside the one before, as
`ba00001200.1-ID`, and only then is that removed, its manifest first. A checkpoint is written to the
disk before it is uploaded, and verified there after it was downloaded.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventloop.checkpoint import bounded_json, disk
from eventloop.checkpoint.damage import Damage
from eventloop.checkpoint.manifest import FILE, Manifest, from_bytes, read_manifest
from eventloop.checkpoint.nest import Nest
from eventloop.checkpoint.objects import Objects
from eventloop.checkpoint.remote_names import batch_in, key_of, successor
from eventloop.checkpoint.store import Store, holds
from eventloop.checkpoint.verifying import examine, facts_in, name_of
from eventloop.errors import CheckpointError
from eventloop.urls import Url


@dataclass(frozen=True)
class Uploaded:
    """A checkpoint that was found in a store, or what looks like one.

    Attributes:
        path: its URL.
        batch: how many batches the run had had.
        facts: what is known of it; empty where it can't be used.
        num_bytes: its size.
        reason: why it can't be used, or "".
    """

    path: Url
    batch: int
    facts: dict[str, Any]
    num_bytes: int
    reason: str


class RemoteStore:
    """The checkpoints under a URL.

    Only one process may write; `Lease` does what can be done for that.

    Args:
        folder: `RUN/checkpoints`.
        copies: a local folder, which holds what was saved or downloaded last.
        pause: waits, in seconds, before what failed is tried again.

    Raises:
        UsageError: a package is missing that knows such URLs.
    """

    def __init__(
        self, folder: Url, copies: Path, *, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self.folder = folder
        self._objects = Objects(folder, pause=pause)
        self._copies = Store(copies)
        # Those that this process has uploaded, or verified: they needn't be downloaded for it.
        self._whole: set[str] = set()

    def save(self, batch: int, parts: Mapping[str, Nest], facts: Mapping[str, Any]) -> Url:
        """Saves a checkpoint and gives its URL; when it returns, the store has all of it.

        One of the same batch is replaced, or kept where this process knows it for whole and equal.
        What killed saves left behind is removed first.

        Args:
            batch, parts, facts: as `Store.save` takes them.

        Raises:
            CheckpointError: something can't be saved, the disk is full, or the store fails.
        """
        self.clear()
        copy = self._copies.save(batch, parts, facts)
        self._copies.keep_only(batch)
        manifest = read_manifest(copy)
        before = [name for name in self._names() if batch_in(name) == batch]
        if before and before[0] in self._whole and self._says(before[0], manifest):
            return self.folder / before[0]
        name = successor(before[0]) if before else name_of(batch)
        self._upload(copy, name, manifest)
        for one in before:
            with suppress(CheckpointError):  # saved it is; the rest is left for `clear`
                self._remove(one)
        return self.folder / name

    def found(self, *, digests: bool = False) -> list[Uploaded]:
        """Gives what looks like a checkpoint, the newest first.

        Args:
            digests: whether all are downloaded and verified; otherwise only the manifests are, and
                that the files are there in their sizes.
        """
        look = self._verified if digests else self._fitting
        return [self._look_at(name, look) for name in self._counting()]

    def latest(self) -> tuple[Url | None, list[tuple[Url, str]]]:
        """Gives the newest checkpoint that verifies, and newer ones with why they can't be used.

        Raises:
            CheckpointError: the store fails: to begin earlier would be wrong then.
        """
        refused: list[tuple[Url, str]] = []
        for name in self._counting():
            one = self._look_at(name, self._copied)
            if not one.reason:
                return one.path, refused
            refused.append((one.path, one.reason))
        return None, refused

    def download(self, url: Url) -> Path:
        """Gives the local copy of a checkpoint, verified; it is downloaded unless it is there.

        Raises:
            CheckpointError: it can't be used, or the store fails.
        """
        try:
            self._copied(url.name)
            return self.copy_of(url)
        except Damage as damage:
            raise CheckpointError(
                f"the checkpoint {str(url)!r} can't be used: {damage}",
                fix=damage.fix or "take another checkpoint",
            ) from damage

    def copy_of(self, url: Url) -> Path:
        """Gives where `download` puts a checkpoint."""
        return self._copies.folder / name_of(batch_in(url.name) or 0)

    def newest_after(self, batch: int) -> int | None:
        """Gives the batch of the newest checkpoint that verifies and has more batches, if any."""
        newer = (one for one in self.found() if one.batch > batch and not one.reason)
        return next((one.batch for one in newer if self._verifies(one.path.name)), None)

    def prune(self, keep: Collection[int]) -> list[Url]:
        """Removes all checkpoints but some and gives those removed; one that verifies always stays.

        Args:
            keep: their batches.

        Raises:
            CheckpointError: one can't be removed.
        """
        names = self._counting()
        kept = [name for name in names if batch_in(name) in keep]
        surplus = [name for name in names if name not in kept]
        if not surplus:
            return []
        # Found before anything is removed.
        safe = next((name for name in [*kept, *surplus] if self._verifies(name)), None)
        removed = [name for name in reversed(surplus) if safe not in (name, None)]
        for name in removed:
            self._remove(name)
        return [self.folder / name for name in removed]

    def clear(self, *, alone: bool = False) -> None:
        """Removes what killed saves and removals left behind, and settles what was being replaced.

        What can't be removed stays: it takes space, and does no harm.
        """
        with suppress(CheckpointError):
            names = self._names()
            counting = [name for name in names if self._counts(name)]
            for name in names:
                if name not in counting:
                    self._remove(name)
            for _, several in itertools.groupby(counting, batch_in):
                self._settle(list(several))

    # How

    def _names(self) -> list[str]:
        """Gives the folders with the name of a checkpoint; the newest first."""
        named = [
            (*key, name)
            for name, size in self._objects.entries().items()
            if size is None and (key := key_of(name)) is not None
        ]
        return [name for _, _, name in sorted(named, reverse=True)]

    def _counting(self) -> list[str]:
        return [name for name in self._names() if self._counts(name)]

    def _counts(self, name: str) -> bool:
        # Where a write can be seen under way, an object is empty first.
        return name in self._whole or bool(self._objects.entries(name).get(FILE))

    def _look_at(self, name: str, look: Callable[[str], Manifest]) -> Uploaded:
        url, batch = self.folder / name, batch_in(name) or 0
        try:
            manifest = look(name)
            return Uploaded(url, batch, facts_in(manifest), manifest.num_bytes, "")
        except Damage as damage:
            self._whole.discard(name)
            return Uploaded(url, batch, {}, 0, str(damage))

    def _verifies(self, name: str) -> bool:
        look = self._fitting if name in self._whole else self._verified
        return not self._look_at(name, look).reason

    def _says(self, name: str, manifest: Manifest) -> bool:
        try:
            there = self._fitting(name)
        except Damage:
            return False
        return (there.files, there.facts) == (manifest.files, manifest.facts)

    def _manifest(self, name: str) -> tuple[Manifest, bytes]:
        """Reads a manifest, and compares the sizes of all files with it.

        Raises:
            Damage: it can't be used, or a file isn't there in its size.
        """
        if batch_in(name) is None:
            raise Damage("that is no name of a checkpoint, such as ba00001200")
        sizes = self._objects.entries(name)
        try:
            num_bytes = sizes.get(FILE) or 0
            if num_bytes > bounded_json.MAX_BYTES:
                raise Damage(f"it has {num_bytes:,} bytes")
            data = self._objects.read(f"{name}/{FILE}", num_bytes) if num_bytes else b""
            manifest = from_bytes(data)
            if manifest.batch != batch_in(name):
                raise Damage(f"it is that of batch {manifest.batch}")
        except FileNotFoundError:
            raise Damage(f"{FILE}: it isn't there any more") from None
        except Damage as damage:
            raise damage.of(FILE) from damage
        for file, wanted in manifest.files.items():
            if sizes.get(file) != wanted.num_bytes:
                there = "it isn't there" if file not in sizes else f"it has {sizes[file]} bytes"
                raise Damage(f"{file}: {there}, {FILE} says {wanted.num_bytes:,} bytes")
        return manifest, data

    def _fitting(self, name: str) -> Manifest:
        return self._manifest(name)[0]

    def _copied(self, name: str) -> Manifest:
        """Makes sure that there is a local copy of a checkpoint that verifies.

        Raises:
            Damage: there is none, and what the store has doesn't verify.
        """
        manifest = self._fitting(name)
        is_here = holds(self._copies.folder / name_of(manifest.batch or 0), manifest)
        return manifest if is_here else self._verified(name)

    def _verified(self, name: str) -> Manifest:
        """Downloads a checkpoint and verifies it, whether there is a copy or not.

        Raises:
            Damage: it doesn't verify.
        """
        manifest, data = self._manifest(name)
        batch = manifest.batch or 0
        with self._told_of_disk(name):
            self._copies.clear()
            self._copies.keep_only(batch)
            self._copies.take_in(batch, lambda folder: self._fill(folder, name, manifest, data))
        self._whole.add(name)
        return manifest

    def _fill(self, folder: Path, name: str, manifest: Manifest, data: bytes) -> Manifest:
        for file, wanted in manifest.files.items():
            try:
                self._objects.download(f"{name}/{file}", folder / file, wanted.num_bytes)
            except FileNotFoundError:
                raise Damage(f"{file}: it isn't there any more") from None
            except Damage as damage:
                raise damage.of(file) from damage
        with disk.NewFile(folder / FILE) as target:
            target.write(data)
        return examine(folder)

    def _upload(self, copy: Path, name: str, manifest: Manifest) -> None:
        with self._removed_on_failure(name):
            for file in manifest.files:
                self._objects.upload(copy / file, f"{name}/{file}")
            there = self._objects.entries(name)
            for file, wanted in manifest.files.items():
                if there.get(file) != wanted.num_bytes:
                    raise CheckpointError(
                        f"{self.folder / name / file} has {there.get(file)} bytes after "
                        f"{wanted.num_bytes} were uploaded",
                        fix="look whether another process writes there",
                    )
            self._objects.publish((copy / FILE).read_bytes(), f"{name}/{FILE}")
        self._whole.add(name)

    def _remove(self, name: str) -> None:
        """Removes a checkpoint; it stops being one before the first of its files is gone."""
        self._whole.discard(name)
        self._objects.remove(f"{name}/{FILE}")
        for file, size in self._objects.entries(name).items():
            if size is not None:
                self._objects.remove(f"{name}/{file}")
        self._objects.remove_folder(name)

    def _settle(self, several: list[str]) -> None:
        """Leaves, of those of one batch, the newest that verifies."""
        if len(several) == 1:
            return
        safe = next((name for name in several if self._verifies(name)), None)
        for name in several:
            if safe not in (name, None):
                self._remove(name)

    @contextmanager
    def _removed_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(CheckpointError):  # the first failure is the one to tell of
                self._remove(name)
            raise

    @contextmanager
    def _told_of_disk(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.folder / name} can't be copied to {str(self._copies.folder)!r}: "
                f"{error.strerror or error}",
                fix="free space there, or start in another folder",
            ) from error
