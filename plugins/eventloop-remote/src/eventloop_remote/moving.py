"""Base classes for storages that move files: the folder of a run's checkpoints, and the storage itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from eventloop.storage import Lock, NewFile, Url
from eventloop_remote.checkpoints import RemoteCheckpoints


class RemoteFolder(ABC):
    """The folder of a run's checkpoints in a storage: transfers their files to and from it.

    It isn't responsible for verifying checkpoints, choosing the latest, or choosing which to remove:
    `RemoteCheckpoints` compares sizes and digests of downloaded files. Each checkpoint has the name of
    its local folder, `ba00001200`, possibly followed by a dot and a suffix. A single run writes at a time,
    as far as the storage's lock can ensure it; its ranks upload different files of a checkpoint.

    Every failure except a missing file raises a `CheckpointError`: a storage that doesn't respond must not
    be mistaken for an empty one. Methods are called one at a time, from several threads.
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Returns the names of all checkpoints with at least a single file; other names may be included."""

    @abstractmethod
    def sizes(self, name: str) -> Mapping[str, int | None]:
        """Returns the files of a checkpoint with their sizes in bytes; empty if it doesn't exist.

        Entries that aren't files have the size None.
        """

    @abstractmethod
    def read(self, name: str, file: str, num_bytes: int) -> bytes:
        """Returns the first `num_bytes` bytes of a file of a checkpoint, or all if it is shorter.

        Raises:
            FileNotFoundError: the file doesn't exist.
        """

    @abstractmethod
    def upload(self, name: str, file: str, source: Path) -> None:
        """Uploads a file of a checkpoint; replaces a file of this name.

        When this returns, other machines can read it. The manifest, `MANIFEST`, comes last, and must be
        uploaded atomically, even if the process is killed.

        Args:
            source: the local file.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first: without one it is incomplete."""

    def download(self, name: str, file: str, target: Path, num_bytes: int) -> None:
        """Copies a file of a checkpoint to a new local file, and flushes it to disk.

        Args:
            num_bytes: size of the file; no more may be written.

        Raises:
            FileNotFoundError: the file doesn't exist.
            OSError: the local file can't be written.
        """
        with NewFile(target) as new:
            new.write(self.read(name, file, num_bytes))


class RemoteStorage:
    """A storage that moves files: the target of an entry point in the group `eventloop.storage`.

    Args:
        folder: returns the folder at a URL, which may be empty. Raises a `UsageError` if the URL can't be
            opened, for example because a package is missing.
        lock: returns the lock that keeps other processes from training the run at a URL, from that URL and
            the lock for processes on this machine, which it acquires and releases, too. Without it, only
            the latter is used.
    """

    def __init__(
        self,
        folder: Callable[[Url], RemoteFolder],
        lock: Callable[[Url, Lock], Lock] = lambda run, local: local,
    ) -> None:
        self.folder = folder
        self.lock = lock

    def checkpoints(self, folder: Url, copies: Path) -> RemoteCheckpoints:
        """Returns the checkpoints under a URL; the local folder `copies` has a copy of the last one."""
        return RemoteCheckpoints(folder, self.folder(folder), copies)
