"""The storage: what the entry point of the group `eventloop.storage` names."""

from __future__ import annotations

from eventloop.storage import Lock, Url
from eventloop_remote.folder import Folder
from eventloop_remote.lease import Lease
from eventloop_remote.objects import Objects


def folder(url: Url) -> Folder:
    """Returns the folder that a URL names.

    Raises:
        UsageError: a package is missing that knows such URLs.
    """
    return Folder(Objects(url))


def lock(run: Url, local: Lock) -> Lease:
    """Returns the lease on the run at a URL, which needs the lock of its local folder, too."""
    return Lease(run, Objects(run), local)
