"""Checkpoints at whatever URL fsspec can write to."""

from eventloop_remote.storage import folder, lock

__all__ = ["folder", "lock"]
