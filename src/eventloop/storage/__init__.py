"""Building blocks for packages that add a storage: the entry-point group `eventloop.storage`.

The name of an entry point is a URL scheme, such as `s3`, or `*` for all other schemes; its object is a
`UrlStorage`. A storage that copies whole files can build on `eventloop_remote` instead, see
`docs/how-to/add-a-storage.md`.

Attributes:
    ALONE: The crew of a checkpoint that is written by a single rank.
    MANIFEST: The name of the manifest file, which is written last: a checkpoint is complete once it exists.
    MAX_MANIFEST_BYTES: The maximum size of a manifest.
"""

from eventloop.checkpoint.locations import UrlCheckpoints, UrlStorage
from eventloop.checkpoint.manifest import MANIFEST, Manifest, parse_manifest, read_manifest
from eventloop.checkpoint.retention import newest_after, remove_each, surplus
from eventloop.checkpoint.run_lock import Lock, RunLock
from eventloop.checkpoint.store import FoundCheckpoint, Store
from eventloop.checkpoint.verifying import (
    batch_in,
    checked_manifest,
    examine,
    holds,
    key_of,
    name_of,
    why_passed_over,
)
from eventloop.distributed.checkpoint_crew import ALONE, Crew
from eventloop.distributed.process_ends import is_alive, this_machine
from eventloop.errors import CheckpointError, UsageError
from eventloop.files.disk import MAX_JSON_BYTES as MAX_MANIFEST_BYTES
from eventloop.files.disk import CorruptFileError, NewFile
from eventloop.files.run_folder import check_folder
from eventloop.urls import Url

__all__ = [
    "ALONE",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "CheckpointError",
    "CorruptFileError",
    "Crew",
    "FoundCheckpoint",
    "Lock",
    "Manifest",
    "NewFile",
    "RunLock",
    "Store",
    "Url",
    "UrlCheckpoints",
    "UrlStorage",
    "UsageError",
    "batch_in",
    "check_folder",
    "checked_manifest",
    "examine",
    "holds",
    "is_alive",
    "key_of",
    "name_of",
    "newest_after",
    "parse_manifest",
    "read_manifest",
    "remove_each",
    "surplus",
    "this_machine",
    "why_passed_over",
]
