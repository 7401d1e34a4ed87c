"""The checkpoints of a run in a store of objects, which has no locks and can't rename.

Each is a folder `ba00001200`, as on a disk. Its files are uploaded one by one, the manifest last:
without one it doesn't count. One that is saved again goes beside the one before, as
`ba00001200.1-ID`, and only then is that removed, its manifest first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from eventloop import CheckpointError
from eventloop.storage import MANIFEST, RemoteFolder, Url, name_of
from eventloop_remote.names import key_of, successor
from eventloop_remote.objects import Objects


class Folder(RemoteFolder):
    """The folder of checkpoints that a URL names.

    Args:
        url: of the folder, for messages.
        objects: those in it.
    """

    def __init__(self, url: Url, objects: Objects) -> None:
        self._url = url
        self._objects = objects
        self._uploaded: set[str] = set()  # by this process, which needn't look for their manifests

    def names(self) -> list[str]:
        """Returns the names of all checkpoints that have a manifest, the newest first."""
        return [name for name in self._named() if self._has_manifest(name)]

    def sizes(self, name: str) -> dict[str, int | None]:
        """Returns the files of a checkpoint with their sizes."""
        return self._objects.entries(name)

    def read(self, name: str, file: str, num_bytes: int) -> bytes:
        """Returns the first bytes of a file."""
        return self._objects.read(f"{name}/{file}", num_bytes)

    def download(self, name: str, file: str, target: Path, num_bytes: int) -> None:
        """Copies a file to a new local one, in pieces."""
        self._objects.download(f"{name}/{file}", target, num_bytes)

    def upload(self, batch: int, copy: Path, files: Mapping[str, int]) -> str:
        """Uploads a checkpoint beside the one that it replaces, and returns its name."""
        before = [name for name in self._named() if name.startswith(name_of(batch))]
        name = successor(before[0]) if before else name_of(batch)
        with self._removed_on_failure(name):
            *others, manifest = files
            for file in others:
                self._objects.upload(copy / file, f"{name}/{file}")
            self._require_sizes(name, {file: files[file] for file in others})
            self._objects.publish((copy / manifest).read_bytes(), f"{name}/{manifest}")
        self._uploaded.add(name)
        return name

    def remove(self, name: str) -> None:
        """Removes a checkpoint; it stops being one before the first of its files is gone."""
        self._uploaded.discard(name)
        self._objects.remove(f"{name}/{MANIFEST}")
        for file, size in self._objects.entries(name).items():
            if size is not None:
                self._objects.remove(f"{name}/{file}")
        self._objects.remove_folder(name)

    def clear(self) -> None:
        """Removes what has the name of a checkpoint and no manifest."""
        for name in self._named():
            if not self._has_manifest(name):
                self.remove(name)

    # How

    def _named(self) -> list[str]:
        """Returns the folders with the name of a checkpoint, the newest first."""
        named = [
            (*key, name)
            for name, size in self._objects.entries().items()
            if size is None and (key := key_of(name)) is not None
        ]
        return [name for _, _, name in sorted(named, reverse=True)]

    def _has_manifest(self, name: str) -> bool:
        # Where a write can be seen under way, an object is empty first.
        return name in self._uploaded or bool(self._objects.entries(name).get(MANIFEST))

    def _require_sizes(self, name: str, wanted: Mapping[str, int]) -> None:
        there = self._objects.entries(name)
        for file, num_bytes in wanted.items():
            if there.get(file) != num_bytes:
                raise CheckpointError(
                    f"{self._url / name / file} has {there.get(file)} bytes after {num_bytes} were "
                    "uploaded",
                    fix="look whether another process writes there",
                )

    @contextmanager
    def _removed_on_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with suppress(CheckpointError):  # the first failure is the one to report
                self.remove(name)
            raise
