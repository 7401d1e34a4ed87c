"""Storages: what one implements, so that checkpoints may be at a URL, and which knows a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from eventloop.checkpoint.remote_checkpoints import RemoteCheckpoints
from eventloop.errors import EventloopError, Note, PluginError, UsageError
from eventloop.files.disk import NewFile
from eventloop.plugin.extensions import extension_problems
from eventloop.plugin.load import imported
from eventloop.plugin.metadata import extensions

if TYPE_CHECKING:
    from eventloop.checkpoint.run_lock import Lock
    from eventloop.plugin.records import Found
    from eventloop.urls import Url

GROUP = "eventloop.storage"
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


class RemoteFolder(ABC):
    """The folder of a run's checkpoints in a storage: how their files get there and back.

    That checkpoints verify, which is the latest, and which are removed isn't its concern: eventloop
    compares sizes and digests of whatever comes back. Each checkpoint has a name: that of its local
    folder, `ba00001200`, which a dot and a suffix may follow. One run at a time writes, as far
    as `RemoteStorage.lock` can see to that; its ranks upload different files of a checkpoint.

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


@runtime_checkable
class RemoteStorage(Protocol):
    """What an entry point of the group `eventloop.storage` names: an instance, or a module."""

    def folder(self, url: Url) -> RemoteFolder:
        """Returns the folder that a URL names; there may be nothing yet.

        Raises:
            UsageError: the URL can't be opened: a package is missing, say.
        """

    def lock(self, run: Url, local: Lock) -> Lock:
        """Returns what keeps other processes from training the run at a URL.

        Args:
            run: the URL of the run.
            local: keeps other processes of this machine out. A storage that can do no more returns
                it; the lock of another one acquires and releases it, too.
        """


def checkpoints_at_url(folder: Url, copies: Path) -> RemoteCheckpoints:
    """Returns the checkpoints under a URL, as `RemoteCheckpoints` takes it.

    Raises:
        UsageError: no storage that is installed knows the URL.
    """
    return RemoteCheckpoints(folder, storage_for(folder).folder(folder), copies)


def storage_for(url: Url) -> RemoteStorage:
    """Imports the storage for a URL and returns it.

    Raises:
        UsageError: none that is installed knows the URL.
        PluginError: two packages have one for its scheme, or it can't be used.
    """
    installed = extensions(GROUP)
    found = _found_for(url, installed)
    problem = extension_problems(installed, {}).get(found)
    if problem is not None:
        raise problem
    return imported_storage(found)


def imported_storage(found: Found) -> RemoteStorage:
    """Imports the storage that an entry point names.

    Raises:
        PluginError: it can't be imported, or isn't a storage.
    """
    storage = imported(found)
    if not isinstance(storage, RemoteStorage):
        raise PluginError(
            f"{found.entry_point.value} isn't a storage: it lacks `folder` or `lock`",
            plugin=found.origin,
            fix="name an object or a module with both functions of eventloop.storage.RemoteStorage",
        )
    blamed: Any = _Blamed(storage, found.origin)
    return cast("RemoteStorage", blamed)


class _Blamed:
    """A storage, or a folder in one: what it raises by mistake says so in a note."""

    def __init__(self, storage: RemoteStorage | RemoteFolder, origin: str) -> None:
        self._storage, self._origin = storage, origin

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._storage, name)

        def called(*args: Any) -> Any:
            try:
                given = list(method(*args)) if name == "names" else method(*args)
            except (EventloopError, OSError):  # as a storage may
                raise
            except Exception as error:
                text = f"raised by the storage {self._origin} in {name}"
                error.add_note(Note(text, "origin"))
                raise
            return _Blamed(given, self._origin) if isinstance(given, RemoteFolder) else given

        return called


def _found_for(url: Url, installed: Sequence[Found]) -> Found:
    named = [one for one in installed if one.name.lower() == url.protocol]
    able = named or [one for one in installed if one.name == ANY]
    if not able:
        raise _none_for(url, installed)
    return able[0]


def _none_for(url: Url, installed: Sequence[Found]) -> UsageError:
    others = ", ".join(one.origin for one in installed)
    driver = _DRIVERS.get(url.protocol, "")
    return UsageError(
        f"{url.protocol}:// needs a storage package, and "
        + (f"none that is installed knows it: {others}" if others else "none is installed"),
        fix=f"python -m pip install eventloop-remote {driver}".rstrip(),
    )
