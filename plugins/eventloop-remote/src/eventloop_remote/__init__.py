"""Checkpoints at whatever URL fsspec can write to, and what storages of other packages that move files build on."""

from eventloop_remote.checkpoints import RemoteCheckpoints
from eventloop_remote.moving import RemoteFolder, RemoteStorage

__all__ = ["RemoteCheckpoints", "RemoteFolder", "RemoteStorage"]
