"""Verifies checkpoints from untrusted sources, without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eventloop.checkpoint import safetensors_files as tensor_file
from eventloop.checkpoint.encoding import Json, Nest, restore
from eventloop.checkpoint.manifest import MANIFEST, FileFacts, Manifest, read_manifest
from eventloop.checkpoint.safetensors_files import Box, TensorEntry
from eventloop.errors import CheckpointError, TaskError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.urls import Place

_NAMED = re.compile(r"(ba[0-9]{8,20})|\.was-(ba[0-9]{8,20})-[0-9a-f-]+")
_IN_STORAGE = re.compile(r"(?P<of>ba[0-9]{8,20})(?:\.(?P<number>[0-9]{1,6})-[0-9a-f]{8})?")


def examine(folder: Path, *, digests: bool = True, shards: bool = True) -> Manifest:
    """Verifies a checkpoint and returns its manifest.

    Args:
        folder: of the checkpoint.
        digests: whether to read the files and compare digests; otherwise only sizes are compared.
        shards: whether to also read the files of slices.

    Raises:
        CorruptFileError: a file doesn't match the manifest.
    """
    manifest = checked_manifest(folder)
    for name, expected in manifest.files.items():
        try:
            check_size(disk.num_bytes_of(folder / name), expected)
        except CorruptFileError as error:
            raise error.of(name) from error
    for part in manifest.parts if digests else ():
        for damage in _damages_of_part(folder, part, manifest, shards=shards):
            raise damage
    return manifest


def holds(folder: Path, manifest: Manifest) -> bool:
    """Returns whether a folder has a complete checkpoint with the files and facts of a manifest."""
    if folder.is_symlink():
        return False
    try:
        existing = read_manifest(folder)
        # All files are read only if the manifests agree.
        is_same = (existing.files, existing.facts) == (manifest.files, manifest.facts)
        return is_same and examine(folder).files == manifest.files
    except CorruptFileError:
        return False


def damages(folder: Path) -> Iterator[CorruptFileError]:
    """Reads all files of a checkpoint and yields every damage."""
    try:
        manifest = checked_manifest(folder)
    except CorruptFileError as damage:
        yield damage
        return
    for part in manifest.parts:
        yield from _damages_of_part(folder, part, manifest)


def require_part(folder: Path, part: str, manifest: Manifest) -> None:
    """Reads the files of a part; raises CorruptFileError if a file doesn't match the manifest."""
    if part not in manifest.parts:
        raise CorruptFileError(f"it has no part {part!r}, only {', '.join(manifest.parts)}")
    for damage in _damages_of_part(folder, part, manifest):
        raise damage


def damage_in_shards(folder: Path, rank: int, world_size: int) -> str:
    """Reads a rank's share of the files of slices; returns the first damage, or "".

    Rank 0 also checks that the slices of all files cover each tensor.
    """
    try:
        manifest = checked_manifest(folder)
        for part in manifest.shards:
            for name in manifest.shards_of(part)[rank::world_size]:
                with opened(folder, name, manifest) as file:
                    tensor_file.read_entries(file, slices=True)
            if rank == 0:
                slices = Slices()
                for name in manifest.shards_of(part):
                    with about(name), disk.OldFile(folder / name) as file:
                        slices.add(tensor_file.read_header(file, slices=True))
                with about(part):
                    slices.require_whole()
    except CorruptFileError as damage:
        return str(damage)
    return ""


def name_of(batch: int) -> str:
    """Returns the folder name of a checkpoint, which sorts by batch: `ba00001200`."""
    return f"ba{batch:08}"


def batch_of(name: str) -> int | None:
    """Returns the batch count in the name of a checkpoint's folder; None for another name."""
    if (match := _NAMED.fullmatch(name)) is None:
        return None
    checkpoint_name = match[1] or match[2]
    batch = int(checkpoint_name.removeprefix("ba"))
    return batch if name_of(batch) == checkpoint_name else None


def key_of(name: str) -> tuple[int, int] | None:
    """Parses the name of a checkpoint in a storage.

    Returns:
        The batch count, and how many checkpoints of this batch it has replaced; None for another
        name.
    """
    match = _IN_STORAGE.fullmatch(name)
    batch = batch_of(match["of"]) if match else None
    return None if match is None or batch is None else (batch, int(match["number"] or 0))


def batch_in(name: str) -> int | None:
    """Returns the batch count in the name of a checkpoint in a storage; None for another name."""
    key = key_of(name)
    return None if key is None else key[0]


def checked_manifest(folder: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        CorruptFileError: it can't be used, or the folder is named after another batch.
    """
    manifest = read_manifest(folder)
    batch_of_name = batch_of(folder.name)
    if batch_of_name is not None and batch_of_name != manifest.batch:
        raise CorruptFileError(
            f"{MANIFEST}: it belongs to batch {manifest.batch}, but the folder to {batch_of_name}"
        )
    manifest.known  # noqa: B018  raises if its facts can't be decoded
    return manifest


def why_passed_over(facts: Mapping[str, Any]) -> str:
    """Returns the reason why a run can't resume automatically from a verified checkpoint, or "".

    Checkpoints of versions that didn't check for finite weights are accepted.
    """
    return "its weights aren't finite" if facts.get("finite") is False else ""


@contextmanager
def refusing(folder: Place, subject: str = "the checkpoint") -> Iterator[None]:
    """Turns damage found in a checkpoint into an error that names the checkpoint."""
    try:
        yield
    except CorruptFileError as damage:
        raise CheckpointError(
            f"{subject} {str(folder)!r} can't be used: {damage}",
            fix=damage.fix or "use another checkpoint, or an earlier copy of this checkpoint",
        ) from damage


@contextmanager
def refusing_file(path: Path) -> Iterator[None]:
    """Turns damage found in a file of weights into an error that names the file."""
    try:
        yield
    except CorruptFileError as damage:
        raise TaskError(
            f"the weights in {path} can't be loaded: {damage}",
            fix="name a file that trainer.export(MANIFEST) or `eventloop fit --export MANIFEST` wrote for "
            "this model, or the folder of a pretrained model",
        ) from damage


@contextmanager
def opened(folder: Path, name: str, manifest: Manifest) -> Iterator[disk.OldFile]:
    """Opens a file and compares its size, and, once it was read, its digest with the manifest."""
    expected = manifest.files[name]
    with about(name), disk.OldFile(folder / name) as file:
        check_size(file.num_bytes, expected)
        yield file
        if file.digest() != expected.sha256:
            raise CorruptFileError(
                "its bytes have changed since it was written: the digest differs"
            )


def check_size(num_bytes: int, expected: FileFacts) -> None:
    """Raises CorruptFileError if the size of a file differs from the manifest."""
    if num_bytes != expected.num_bytes:
        raise CorruptFileError(
            f"it has {num_bytes:,} bytes, {MANIFEST} says {expected.num_bytes:,}"
        )


@contextmanager
def about(name: str) -> Iterator[None]:
    """Prefixes damage with the name of the file."""
    try:
        yield
    except CorruptFileError as damage:
        raise damage.of(name) from damage


def put_together(folder: Path, part: str, manifest: Manifest, tensors: Mapping[str, Any]) -> Nest:
    """Builds the nest of a part from its tensors; raises CorruptFileError if they don't fit."""
    if (name := manifest.parts[part].get(".json")) is None:
        return dict(tensors)
    skeleton = _read_json(folder, name, manifest)
    with about(name):
        return restore(skeleton, tensors)


def _damages_of_part(
    folder: Path, part: str, manifest: Manifest, *, shards: bool = True
) -> Iterator[CorruptFileError]:
    """Reads the files of a part and yields their damage."""
    files = manifest.parts[part]
    slices = Slices()
    is_readable = True
    names: dict[str, None] = {}
    shard_names = manifest.shards_of(part) if shards else []
    for name in [*shard_names, *([files[".safetensors"]] if ".safetensors" in files else [])]:
        try:
            with opened(folder, name, manifest) as file:
                entries = tensor_file.read_entries(file, slices=name in shard_names)
                if name in shard_names:
                    slices.add(entries)
                names |= dict.fromkeys(entries)
        except CorruptFileError as damage:
            yield damage
            is_readable = False
    if is_readable:
        try:
            slices.require_whole()
        except CorruptFileError as damage:
            yield damage
    if json := files.get(".json"):
        try:
            skeleton = _read_json(folder, json, manifest)
            if is_readable and len(shard_names) == manifest.shards.get(part, 0):
                with about(json):
                    restore(skeleton, names)
        except CorruptFileError as damage:
            yield damage


def _read_json(folder: Path, name: str, manifest: Manifest) -> Json:
    with opened(folder, name, manifest) as file:
        data = file.read_json()
    with about(name):
        return disk.from_json(data)


class Slices:
    """The offsets of a part's slices, from the headers of its files."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._boxes: dict[str, list[Box]] = {}

    def add(self, entries: Mapping[str, TensorEntry]) -> None:
        """Adds a file's entries; raises CorruptFileError if a tensor has another shape or dtype."""
        for name, entry in entries.items():
            kind = (entry.dtype, entry.whole)
            if self._kinds.setdefault(name, kind) != kind:
                raise CorruptFileError(f"its slice of {name[:80]!r} belongs to another tensor")
            if math.prod(entry.box.shape):
                self._boxes.setdefault(name, []).append(entry.box)

    def require_whole(self) -> None:
        """Raises CorruptFileError unless each element of each tensor is in exactly one slice."""
        for name, (_, whole_shape) in self._kinds.items():
            boxes = self._boxes.get(name, [])
            if sum(math.prod(box.shape) for box in boxes) != math.prod(whole_shape):
                raise CorruptFileError(f"the slices don't cover all of {name[:80]!r}")
            if _overlap(boxes):
                raise CorruptFileError(f"two slices of {name[:80]!r} overlap")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether two boxes share an entry."""
    if len(boxes) < 2 or not boxes[0].shape:
        return len(boxes) > 1
    # A sweep along the dimension with the most distinct offsets: few boxes are open at a time there,
    # so that few pairs are compared.
    num_starts = [len(set(starts)) for starts in zip(*(box.offsets for box in boxes), strict=True)]
    dim = num_starts.index(max(num_starts))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda other_box: other_box.offsets[dim]):
        start = box.offsets[dim]
        open_boxes = [
            other_box
            for other_box in open_boxes
            if other_box.offsets[dim] + other_box.shape[dim] > start
        ]
        if any(box.meets(other_box) for other_box in open_boxes):
            return True
        open_boxes.append(box)
    return False
