"""What a package imports to add where checkpoints are: the entry-point group `eventloop.storage`.

An entry point is named after a scheme of URLs, `s3`, or `*` for all that no other one names. It names
a `RemoteStorage`, which opens `RemoteFolder`s. `docs/how-to/add-a-storage.md` shows one.

Attributes:
    MANIFEST: The name of the file of a checkpoint that is written last.
"""

from eventloop.checkpoint.leftovers import is_alive, this_place
from eventloop.checkpoint.manifest import FILE as MANIFEST
from eventloop.checkpoint.remote_storage import RemoteFolder, RemoteStorage
from eventloop.checkpoint.run_lock import Lock
from eventloop.errors import UsageError
from eventloop.files.disk import NewFile
from eventloop.urls import Url

__all__ = [
    "MANIFEST",
    "Lock",
    "NewFile",
    "RemoteFolder",
    "RemoteStorage",
    "Url",
    "UsageError",
    "is_alive",
    "this_place",
]
