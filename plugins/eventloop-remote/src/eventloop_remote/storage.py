"""The storage: target of the entry point in the group `eventloop.storage`."""

from __future__ import annotations

from eventloop.storage import Lock, Url
from eventloop_remote.folder import Folder
from eventloop_remote.lease import Lease
from eventloop_remote.moving import RemoteStorage
from eventloop_remote.objects import Objects


def _folder(url: Url) -> Folder:
    return Folder(Objects(url))


def _lease(run: Url, local: Lock) -> Lease:
    return Lease(run, Objects(run), local)


storage = RemoteStorage(_folder, _lease)
