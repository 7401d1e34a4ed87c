"""The checkpoints of a run in a store of objects, which has no locks and can't rename."""

from __future__ import annotations

from pathlib import Path

from eventloop.storage import MANIFEST
from eventloop_remote.moving import RemoteFolder
from eventloop_remote.objects import Objects


class Folder(RemoteFolder):
    """The folder of checkpoints that a URL names.

    Args:
        objects: the objects in the folder.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def names(self) -> list[str]:
        """Returns the names of all folders."""
        return [name for name, size in self._objects.entries().items() if size is None]

    def sizes(self, name: str) -> dict[str, int | None]:
        """Returns the files of a checkpoint with their sizes."""
        return self._objects.entries(name)

    def read(self, name: str, file: str, num_bytes: int) -> bytes:
        """Returns the first bytes of a file."""
        return self._objects.read(f"{name}/{file}", num_bytes)

    def download(self, name: str, file: str, target: Path, num_bytes: int) -> None:
        """Copies a file to a new local file, in chunks."""
        self._objects.download(f"{name}/{file}", target, num_bytes)

    def upload(self, name: str, file: str, source: Path) -> None:
        """Uploads a file; a manifest is uploaded atomically."""
        if file == MANIFEST:
            self._objects.publish(source.read_bytes(), f"{name}/{file}")
        else:
            self._objects.upload(source, f"{name}/{file}")

    def remove(self, name: str) -> None:
        """Removes a checkpoint; its manifest first, so that it is incomplete before any other file is gone."""
        self._objects.remove(f"{name}/{MANIFEST}")
        for file, size in self._objects.entries(name).items():
            if size is not None:
                self._objects.remove(f"{name}/{file}")
        self._objects.remove_folder(name)
