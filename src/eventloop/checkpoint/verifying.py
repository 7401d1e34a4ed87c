"""Checkpoints as strangers may have left them: looked at and verified, without torch.

Nothing is evaluated, and what is read is what was verified: each file is opened once, with care, and
digested while it is taken in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eventloop.checkpoint import tensors as tensor_file
from eventloop.checkpoint.encoding import Json, Nest, restore
from eventloop.checkpoint.manifest import FILE, FileFacts, Manifest, read_manifest
from eventloop.files import bounded_json, disk
from eventloop.files.disk import CorruptFileError

_NAMED = re.compile(r"(ba[0-9]{8,20})|\.was-(ba[0-9]{8,20})-[0-9a-f-]+")


def examine(folder: Path, *, digests: bool = True) -> Manifest:
    """Returns the manifest of a checkpoint that is as it says; for who wants the reason, if not.

    Args:
        digests: whether files are read and digested; otherwise only their sizes are compared.

    Raises:
        CorruptFileError: it isn't as it says.
    """
    manifest = checked_manifest(folder)
    for name, wanted in manifest.files.items():
        try:
            _check_size(disk.num_bytes_of(folder / name), wanted)
        except CorruptFileError as unlike:
            raise unlike.of(name) from unlike
    manifest.known  # noqa: B018  raises where they can't be put together
    if digests:
        for files in manifest.parts.values():
            for damage in _damages_of_part(folder, files, manifest):
                raise damage
    return manifest


def damages(folder: Path) -> Iterator[CorruptFileError]:
    """Reads all of a checkpoint without keeping it; yields what is wrong with each of its files."""
    try:
        manifest = checked_manifest(folder)
        manifest.known  # noqa: B018
    except CorruptFileError as damage:
        yield damage
        return
    for files in manifest.parts.values():
        yield from _damages_of_part(folder, files, manifest)


def name_of(batch: int) -> str:
    """Returns the name of the folder of a checkpoint: `ba00001200`, which sorts by batches."""
    return f"ba{batch:08}"


def batch_of(name: str) -> int | None:
    """Returns the batches in the name of a checkpoint's folder; None for another name."""
    found = _NAMED.fullmatch(name)
    if found is None:
        return None
    plain = found[1] or found[2]
    batch = int(plain.removeprefix("ba"))
    return batch if name_of(batch) == plain else None


def checked_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, whose name may say of which batch it is.

    Raises:
        CorruptFileError: there is none that could be used.
    """
    manifest = read_manifest(folder)
    named = batch_of(folder.name)
    if named is not None and named != manifest.batch:
        raise CorruptFileError(
            f"{FILE}: it is that of batch {manifest.batch}, the folder's name says {named}"
        )
    return manifest


def why_passed_over(facts: Mapping[str, Any]) -> str:
    """Returns why no run starts by itself from a checkpoint that verifies, or "" where one may.

    Checkpoints of versions that didn't look whether weights are finite may.
    """
    return "its weights aren't finite" if facts.get("finite") is False else ""


@contextmanager
def opened(folder: Path, name: str, manifest: Manifest) -> Iterator[disk.OldFile]:
    """Opens a file of the size that the manifest says; compares the digest of what was read."""
    wanted = manifest.files[name]
    with _about(name), disk.OldFile(folder / name) as file:
        _check_size(file.num_bytes, wanted)
        yield file
        if file.digest() != wanted.sha256:
            raise CorruptFileError("its bytes aren't those that were written: the digest differs")


def put_together(
    folder: Path, files: Mapping[str, str], manifest: Manifest, tensors: Mapping[str, Any]
) -> Nest:
    """Returns the nest of a part of which the tensors have been read.

    Raises:
        CorruptFileError: its other file isn't what the manifest says, or doesn't fit the tensors.
    """
    name = files.get(".json")
    if name is None:
        return dict(tensors)
    return _restore(name, _read_json(folder, name, manifest), tensors)


# How


def _damages_of_part(
    folder: Path, files: Mapping[str, str], manifest: Manifest
) -> Iterator[CorruptFileError]:
    """Reads the files of a part without keeping what is in them."""
    names: list[str] | None = []
    if name := files.get(".safetensors"):
        try:
            with opened(folder, name, manifest) as file:
                names = tensor_file.read_names(file)
        except CorruptFileError as damage:
            yield damage
            names = None
    if name := files.get(".json"):
        try:
            skeleton = _read_json(folder, name, manifest)
            if names is not None:
                _restore(name, skeleton, dict.fromkeys(names))
        except CorruptFileError as damage:
            yield damage


def _read_json(folder: Path, name: str, manifest: Manifest) -> Json:
    with opened(folder, name, manifest) as file:
        if file.num_bytes > bounded_json.MAX_BYTES:
            raise CorruptFileError(f"it has {file.num_bytes:,} bytes")
        data = file.read(file.num_bytes)
    with _about(name):
        return bounded_json.from_bytes(data)


def _restore(name: str, skeleton: Json, tensors: Mapping[str, Any]) -> Nest:
    with _about(name):
        return restore(skeleton, tensors)


def _check_size(num_bytes: int, wanted: FileFacts) -> None:
    if num_bytes != wanted.num_bytes:
        raise CorruptFileError(f"it has {num_bytes:,} bytes, {FILE} says {wanted.num_bytes:,}")


@contextmanager
def _about(name: str) -> Iterator[None]:
    try:
        yield
    except CorruptFileError as damage:
        raise damage.of(name) from damage
