"""Which storage knows a URL: found by the URL's scheme in the metadata of what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.checkpoint.remote_checkpoints import RemoteCheckpoints
from eventloop.checkpoint.remote_folder import RemoteStorage
from eventloop.errors import PluginError, UsageError
from eventloop.plugin.extensions import extension_problems
from eventloop.plugin.load import imported
from eventloop.plugin.metadata import extensions

if TYPE_CHECKING:
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


def checkpoints_at_url(folder: Url, copies: Path) -> RemoteCheckpoints:
    """Returns the checkpoints under a URL.

    Args:
        folder: `RUN/checkpoints`.
        copies: the local folder for what was saved or downloaded last.

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
    return storage


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
