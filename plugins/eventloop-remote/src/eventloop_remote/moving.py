"""What a storage implements that moves files: the folder of a run's checkpoints, and the storage of such folders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from eventloop.storage import Lock, NewFile, Url
from eventloop_remote.checkpoints import RemoteCheckpoints


class RemoteFolder(ABC):
    """The folder of a run's checkpoints in a storage: how their files get there and back.

    That checkpoints verify, which is the latest, and which are removed isn't its concern: `RemoteCheckpoints`
    compares sizes and digests of whatever comes back. Each checkpoint has a name: that of its local
    folder, `ba00001200`, which a dot and a suffix may follow. One run at a time writes, as far
    as the storage's lock can see to that; its ranks upload different files of a checkpoint.

    What fails raises a `CheckpointError`, unless it is a missing file: a storage that doesn't answer
    must not be mistaken for an empty one. Methods are called one at a time, from several threads.
    """

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Returns the names of all checkpoints of which there is a file; others may be among them."""

    @abstractmethod
    def sizes(self, name: str) -> Mapping[str, int | None]:
        """Returns the files of a checkpoint with their sizes in bytes; empty if it isn't there.

        What isn't a file has the size None.
        """

    @abstractmethod
    def read(self, name: str, file: str, num_bytes: int) -> bytes:
        """Returns the first `num_bytes` bytes of a file of a checkpoint, or what there is of them.

        Raises:
            FileNotFoundError: it isn't there.
        """

    @abstractmethod
    def upload(self, name: str, file: str, source: Path) -> None:
        """Uploads a file of a checkpoint; a file of this name is replaced.

        When this returns, it is there for other machines. The manifest, `MANIFEST`, comes last, and
        is there as a whole or not at all, whatever moment this is killed at.

        Args:
            source: the local file.
        """

    @abstractmethod
    def remove(self, name: str) -> None:
        """Removes a checkpoint, its manifest first: without one it doesn't count."""

    def download(self, name: str, file: str, target: Path, num_bytes: int) -> None:
        """Copies a file of a checkpoint to a new local file, which would outlive a power failure.

        Args:
            num_bytes: its size; no more may be written.

        Raises:
            FileNotFoundError: it isn't there.
            OSError: it can't be written.
        """
        with NewFile(target) as new:
            new.write(self.read(name, file, num_bytes))


class RemoteStorage:
    """A storage that moves files: what an entry point of the group `eventloop.storage` names.

    Args:
        folder: returns the folder that a URL names; there may be nothing yet. It raises a `UsageError` where
            the URL can't be opened: a package is missing, say.
        lock: returns what keeps other processes from training the run at a URL, from that URL and the lock
            that keeps those of this machine out, which it acquires and releases, too. Without it there
            is the latter alone.
    """

    def __init__(
        self,
        folder: Callable[[Url], RemoteFolder],
        lock: Callable[[Url, Lock], Lock] = lambda run, local: local,
    ) -> None:
        self.folder = folder
        self.lock = lock

    def checkpoints(self, folder: Url, copies: Path) -> RemoteCheckpoints:
        """Returns the checkpoints under a URL, of which the last one is in the local folder `copies`, too."""
        return RemoteCheckpoints(folder, self.folder(folder), copies)
