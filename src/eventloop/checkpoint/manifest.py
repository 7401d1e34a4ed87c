"""The manifest of a checkpoint: its files with sizes and digests, and a description.

It is written last and starts with the SHA-256 of its remaining bytes, so a folder whose manifest is
missing, incomplete or changed isn't a checkpoint. Digests detect damage, but not the author of a file.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eventloop
from eventloop.checkpoint.encoding import restore
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError, OldFile

if TYPE_CHECKING:
    from eventloop.checkpoint.encoding import Json

MANIFEST = "manifest.json"
LEFT_OUT = "left_out"  # the fact with the digest of weights that aren't saved
FORMAT = "eventloop checkpoint"
VERSION = 1  # the version of checkpoints without slices
VERSION_OF_SHARDS = 2
MOST_SHARDS = 2**16
SUFFIXES = (".safetensors", ".json")
BEGINNING = b'{"sha256":"'

_HEAD = re.compile(rb'\{"sha256":"([0-9a-f]{64})",\n')
_PART = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileFacts:
    """The expected size of a file and the SHA-256 of its bytes, in hexadecimal digits."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        batch: the run's batch count, if the checkpoint belongs to a run.
        files: the files by name, without the manifest itself.
        facts: the description, encoded by `encoding`.
        eventloop: the version of eventloop that wrote it.
        shards: for each part with slices, the number of files that contain them.
    """

    batch: int | None
    files: Mapping[str, FileFacts]
    facts: Json
    eventloop: str = eventloop.__version__
    shards: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def parts(self) -> dict[str, dict[str, str]]:
        """The files of each part by suffix, without shards; parts are sorted by name."""
        parts: dict[str, dict[str, str]] = {name: {} for name in self.shards}
        shard_names = {shard for name in self.shards for shard in self.shards_of(name)}
        for name in sorted(self.files.keys() - shard_names):
            suffix = Path(name).suffix
            parts.setdefault(name.removesuffix(suffix), {})[suffix] = name
        return {name: parts[name] for name in sorted(parts)}

    def shards_of(self, part: str) -> list[str]:
        """Returns the files of slices of a part, in order of the ranks that wrote them."""
        return [shard_name(part, rank) for rank in range(self.shards.get(part, 0))]

    @functools.cached_property
    def known(self) -> dict[str, Any]:
        """The decoded facts; raises CorruptFileError if they can't be decoded."""
        try:
            facts = restore(self.facts, {})
        except CorruptFileError as damage:
            raise damage.of(f"{MANIFEST}: facts") from damage
        if not isinstance(facts, dict):
            raise CorruptFileError(f"{MANIFEST}: facts: they aren't a dict")
        return facts

    @property
    def num_bytes(self) -> int:
        """The total size of the files, without the manifest itself."""
        return sum([file_facts.num_bytes for file_facts in self.files.values()])


def is_part_name(name: str) -> bool:
    """Returns whether a part can have this name: a valid file name on every system.

    Upper-case letters aren't allowed, because some file systems ignore case.
    """
    return bool(_PART.fullmatch(name)) and f"{name}.json" != MANIFEST


def shard_name(part: str, rank: int) -> str:
    """Returns the name of the file with a rank's slices of a part."""
    return f"{part}-{rank:05}.safetensors"


def manifest_bytes(manifest: Manifest) -> bytes:
    """Returns the bytes of a manifest.

    Raises:
        CorruptFileError: its facts are too large.
    """
    files = {
        name: {"bytes": file_facts.num_bytes, "sha256": file_facts.sha256}
        for name, file_facts in sorted(manifest.files.items())
    }
    shards = {"shards": dict(manifest.shards)} if manifest.shards else {}
    body = disk.to_json(
        {
            "format": FORMAT,
            "version": VERSION_OF_SHARDS if shards else VERSION,
            "eventloop": manifest.eventloop,
            "batch": manifest.batch,
            "files": files,
            **shards,
            "facts": manifest.facts,
        }
    )
    digested = body.removeprefix(b"{") + b"\n"
    return BEGINNING + b'%s",\n%s' % (hashlib.sha256(digested).hexdigest().encode(), digested)


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, of this version or an older one.

    Raises:
        CorruptFileError: the manifest is missing, incomplete, or of a newer version.
    """
    try:
        with OldFile(folder / MANIFEST) as file:
            data = file.read_json()
        return parse_manifest(data)
    except CorruptFileError as damage:
        raise damage.of(MANIFEST) from damage


def parse_manifest(data: bytes) -> Manifest:
    """Parses a manifest of this version or an older one.

    Raises:
        CorruptFileError: it isn't a manifest, is incomplete, or is of a newer version.
    """
    if not data:
        raise CorruptFileError("it is empty")
    head = _HEAD.match(data)
    is_intact = (
        head is not None and hashlib.sha256(data[head.end() :]).hexdigest() == head[1].decode()
    )
    try:
        value = disk.from_json(data)
    except CorruptFileError as damage:
        raise CorruptFileError(f"it is damaged: {damage}") from damage
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise CorruptFileError("it isn't the manifest of a checkpoint")
    version = value.get("version")
    # Checked before the digest, because a newer version may compute the digest in another way.
    if type(version) is int and version > max(_READERS):
        writer = value.get("eventloop")
        writer_text = repr(writer[:40]) if isinstance(writer, str) else "of an unknown version"
        raise CorruptFileError(
            f"it has version {version} of the format, written by eventloop {writer_text}; "
            f"this is eventloop {eventloop.__version__!r}, which knows versions up to {max(_READERS)}",
            fix="python -m pip install --upgrade torch-eventloop",
        )
    if not is_intact:
        raise CorruptFileError("it is damaged: its bytes don't match its digest")
    if type(version) is not int or version not in _READERS:
        version_text = version if type(version) is int else f"of type {type(version).__name__}"
        raise CorruptFileError(f"the format has no version {version_text}")
    return _READERS[version](value)


def _read_version_1(value: dict[str, Any]) -> Manifest:
    match value:
        case {"eventloop": str(writer), "batch": batch, "files": dict(files), "facts": facts}:
            if batch is None or (type(batch) is int and batch >= 0):
                file_facts = {name: _file_facts(name, fields) for name, fields in files.items()}
                return Manifest(batch, file_facts, facts, writer)
    raise CorruptFileError("it lacks a field, or a field has the wrong type")


def _read_version_2(value: dict[str, Any]) -> Manifest:
    manifest = _read_version_1(value)
    match value.get("shards"):
        case dict(shards) if all(
            is_part_name(part) and type(num) is int and 0 < num <= MOST_SHARDS
            for part, num in shards.items()
        ):
            manifest = replace(manifest, shards=shards)
            for part in shards:
                if missing := next(
                    (name for name in manifest.shards_of(part) if name not in manifest.files), ""
                ):
                    raise CorruptFileError(f"it lacks the shard {missing!r}")
            return manifest
    raise CorruptFileError("its field 'shards' is invalid")


def _file_facts(name: str, value: Any) -> FileFacts:
    suffix = Path(name).suffix
    if suffix not in SUFFIXES or not is_part_name(name.removesuffix(suffix)):
        raise CorruptFileError(f"{name[:80]!r} is not a valid name of a file in a checkpoint")
    match value:
        case {"bytes": int(num_bytes), "sha256": str(sha256)} if _DIGEST.fullmatch(sha256):
            if type(num_bytes) is int and num_bytes >= 0:
                return FileFacts(num_bytes, sha256)
    raise CorruptFileError(f"its entry for {name!r} is invalid")


# A version that changes the format adds a reader that returns today's Manifest, and keeps the older
# readers: the fixtures of all versions in tests/checkpoint/fixtures must stay readable.
_READERS: dict[int, Callable[[dict[str, Any]], Manifest]] = {
    1: _read_version_1,
    VERSION_OF_SHARDS: _read_version_2,
}
