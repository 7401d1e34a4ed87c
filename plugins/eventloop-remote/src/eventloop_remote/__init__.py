"""Checkpoints at any URL that fsspec can write to, and base classes for storages of other packages."""

from eventloop_remote.checkpoints import RemoteCheckpoints
from eventloop_remote.moving import RemoteFolder, RemoteStorage

__all__ = ["RemoteCheckpoints", "RemoteFolder", "RemoteStorage"]
