"""Storages from packages, for checkpoints at URLs: their protocol, and the storage for a URL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from eventloop.checkpoint.store import Checkpoints
from eventloop.errors import EventloopError, Note, PluginError, UsageError
from eventloop.plugin.extensions import extension_problems
from eventloop.plugin.load import imported
from eventloop.plugin.metadata import extensions
from eventloop.urls import Url

if TYPE_CHECKING:
    from eventloop.checkpoint.run_lock import Lock
    from eventloop.plugin.records import Found

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


class UrlCheckpoints(Checkpoints[Url], Protocol):
    """The checkpoints under a URL; `key_of` parses their names.

    A failure raises `CheckpointError`: a storage that doesn't respond must not look like an empty
    one.
    """

    def has(self, name: str) -> bool:
        """Whether there is a checkpoint with this name, damaged or not."""

    def download(self, url: Url) -> Path:
        """Returns the verified local copy of a checkpoint, downloading it if needed.

        Raises:
            CheckpointError: it can't be used, or the storage fails.
        """


@runtime_checkable
class UrlStorage(Protocol):
    """The object that an entry point of `eventloop.storage` names: an instance, or a module."""

    def checkpoints(self, folder: Url, copies: Path) -> UrlCheckpoints:
        """Returns the checkpoints under a URL, which can be empty.

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


def storage_for(url: Url) -> UrlStorage:
    """Imports the storage for a URL and returns it.

    Raises:
        UsageError: no installed storage knows the URL.
        PluginError: two packages have a storage for its scheme, or it can't be used.
    """
    installed = extensions(GROUP)
    found = _found_for(url, installed)
    problem = extension_problems(installed, {}).get(found)
    if problem is not None:
        raise problem
    return imported_storage(found)


def imported_storage(found: Found) -> UrlStorage:
    """Imports the storage that an entry point names.

    Raises:
        PluginError: it can't be imported, or isn't a storage.
    """
    storage = imported(found)
    if not isinstance(storage, UrlStorage):
        raise PluginError(
            f"{found.entry_point.value} isn't a storage: it lacks `checkpoints` or `lock`",
            plugin=found.origin,
            fix="name an object or a module with both functions of eventloop.storage.UrlStorage",
        )
    blamed: Any = _Blamed(storage, found.origin)
    return cast("UrlStorage", blamed)


class _Blamed:
    """Wraps a storage, or the checkpoints in it, and adds a note to its unexpected exceptions."""

    def __init__(self, blamed: UrlStorage | UrlCheckpoints, origin: str) -> None:
        self._blamed, self._origin = blamed, origin

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._blamed, name)

        def called(*args: Any, **named: Any) -> Any:
            try:
                result = value(*args, **named)
            except (EventloopError, OSError):  # as a storage may
                raise
            except Exception as error:
                text = f"raised by the storage {self._origin} in {name}"
                error.add_note(Note(text, "origin"))
                raise
            return _Blamed(result, self._origin) if name == "checkpoints" else result

        return value if name == "folder" else called


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
