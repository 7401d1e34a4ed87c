"""Writes and reads a checkpoint: a folder of parts, in safetensors and JSON files, with a manifest.

Each part is a nest. Its tensors are in `NAME.safetensors`, other values in `NAME.json`, which a
flat dict of tensors doesn't need. Slices of tensors that are sharded over ranks are in
`NAME-00000.safetensors` and so on, a file per rank. `manifest.json` is written last. No file is
pickled, and reading evaluates no code.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventloop.checkpoint import safetensors_files as tensor_file
from eventloop.checkpoint.encoding import Json, Nest, Tensors, flatten, is_plain
from eventloop.checkpoint.manifest import (
    MANIFEST,
    FileFacts,
    Manifest,
    is_part_name,
    manifest_bytes,
    shard_name,
)
from eventloop.checkpoint.saved_tensors import read_part, saved_tensors
from eventloop.checkpoint.verifying import (
    checked_manifest,
    opened,
    put_together,
    refusing,
    require_part,
)
from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.fixes import as_set
from eventloop.training.tensor_slices import TensorSlice

_BLOCK_BYTES = 4096  # the block size of most file systems; a file takes whole blocks


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, with the parts that were read.

    Attributes:
        path: the folder.
        batch: the run's batch count; None for a checkpoint that belongs to no run.
        facts: the description, readable without opening the parts.
        parts: the requested parts by name.
        eventloop: the version of eventloop that wrote it.
        names: the names of all parts.
    """

    path: Path
    batch: int | None
    facts: dict[str, Any]
    parts: dict[str, Nest]
    eventloop: str
    names: tuple[str, ...]


def write_checkpoint(
    folder: str | Path,
    parts: Mapping[str, Nest],
    facts: Mapping[str, Any],
    *,
    batch: int | None = None,
) -> None:
    """Writes a checkpoint into a folder, which is created if missing; never replaces a file.

    When it returns, everything is synced to disk except the folder's own name. If it is
    interrupted, the folder has no manifest.

    Args:
        folder: to write into.
        parts: nests by name; names consist of lower-case letters, digits, `_`, `-` and `.`.
        facts: a small nest without tensors, which is read to list checkpoints.
        batch: the run's batch count.

    Raises:
        CheckpointError: a value can't be saved, raised before anything is written; or the disk is
            full or fails, with the needed and the free space in the message.
    """
    folder = Path(folder)
    draft = Draft(parts, facts, batch)
    with draft.failing(folder):
        disk.require_space(folder, draft.num_bytes)
        disk.make_folders(folder)
        draft.write_manifest(folder, draft.write_files(folder))


def read_checkpoint(
    folder: str | Path,
    only: Collection[str] | None = None,
    *,
    leaving: Collection[str] = (),
    nearest: float = 0.0,
) -> Checkpoint:
    """Reads a checkpoint, or some parts of it; verifies everything it reads.

    Args:
        folder: of the checkpoint.
        only: the names of the parts to read; by default all.
        leaving: parts whose tensors aren't loaded: each is a `SavedTensor`. Their files must have
            been verified before.
        nearest: the position among the ranks that wrote the checkpoint, in [0, 1), where to look for
            slices first.

    Raises:
        CheckpointError: it isn't a checkpoint, is damaged, has a newer version, or lacks a part.
    """
    folder = Path(folder)
    with refusing(folder):
        manifest = checked_manifest(folder)
        files = manifest.parts
        requested_names = list(files) if only is None else list(only)
        if missing := sorted(set(requested_names) - files.keys()):
            raise CorruptFileError(
                f"it has no part {', '.join(map(repr, missing))}, only {', '.join(files)}"
            )
        parts = {
            name: put_together(
                folder, name, manifest, saved_tensors(folder, name, manifest, nearest)
            )
            if name in leaving
            else read_part(folder, name, manifest)
            for name in requested_names
        }
        facts = manifest.known
    return Checkpoint(folder, manifest.batch, facts, parts, manifest.eventloop, tuple(files))


def verify_part(folder: Path, part: str) -> None:
    """Verifies a part of a checkpoint, raising CheckpointError."""
    with refusing(folder):
        require_part(folder, part, checked_manifest(folder))


class Draft:
    """A validated checkpoint that will be written; tensors aren't copied.

    Each rank writes its slices, and its own part, such as `rank3`. Rank 0 writes everything else.

    Attributes:
        num_bytes: the size on disk of this rank's files.

    Raises:
        CheckpointError: a value can't be saved.
    """

    def __init__(
        self,
        parts: Mapping[str, Nest],
        facts: Mapping[str, Any],
        batch: int | None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._batch = batch
        self._rank = rank
        self._world_size = world_size
        self._files: dict[str, bytes | tensor_file.NewTensors] = {}
        self._sharded: list[str] = []
        self._made: list[Path] = []
        for name, nest in parts.items():
            if not is_part_name(name):
                raise CheckpointError(
                    f"no part of a checkpoint can be called {name!r}",
                    fix="use lower-case letters, digits, '_', '-' and '.', and not 'manifest'",
                )
            self._add(name, *flatten(nest, name))
        tensors, self._facts = flatten(dict(facts), "facts")
        if tensors:
            raise CheckpointError(
                f"facts.{next(iter(tensors))} is a tensor; facts are read without the parts",
                fix="move it into a part, or save `tensor.item()`",
            )
        # The size of the manifest: an entry takes about a hundred bytes, however large its file is.
        unknown = dict.fromkeys(self._files, FileFacts(2**40, "0" * 64))
        contents = self._files.values()
        sizes = [
            len(content) if isinstance(content, bytes) else content.num_bytes
            for content in contents
        ]
        sizes.append(len(_fitting("facts", manifest_bytes, self._of(unknown))))
        self.num_bytes = sum(-(-content // _BLOCK_BYTES) * _BLOCK_BYTES for content in [*sizes, 1])

    def write_files(self, folder: Path) -> dict[str, FileFacts]:
        """Writes this rank's files; with several ranks, also reads them back.

        Raises:
            OSError: the disk is full or fails.
        """
        files = {}
        for name, content in self._files.items():
            with disk.NewFile(folder / name) as file:
                self._made.append(folder / name)
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content.write(file)
            files[name] = FileFacts(file.num_bytes, file.digest())
        if self._world_size > 1:
            disk.sync_folder(folder)
            with refusing(folder):
                for name in files:
                    with opened(folder, name, self._of(files)) as written:
                        written.skip()
        return files

    def write_manifest(self, folder: Path, files: Mapping[str, FileFacts]) -> Manifest:
        """Writes the manifest for the files of all ranks, which are on disk already.

        Raises:
            OSError: the disk is full or fails.
        """
        manifest = self._of(files)
        with disk.NewFile(folder / MANIFEST) as file:
            self._made.append(folder / MANIFEST)
            file.write(_fitting("facts", manifest_bytes, manifest))
        disk.sync_folder(folder)
        return manifest

    @contextmanager
    def failing(self, folder: Path) -> Iterator[None]:
        """Removes the written files if the `with` block raises.

        Raises:
            CheckpointError: instead of an OSError, with the needed and the free space.
        """
        try:
            yield
        except BaseException as error:
            for path in self._made:
                with suppress(OSError):  # must not hide the first failure
                    disk.remove_file(path)
            if not isinstance(error, OSError):
                raise
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            fix = "free space" if is_full else f"check the file system of {str(folder.parent)!r}"
            reason = error.strerror or error
            raise CheckpointError(
                f"the checkpoint can't be written to {str(folder)!r}: {reason}",
                needed=f"{self.num_bytes:,} bytes",
                free=f"{disk.num_free_bytes(folder):,} bytes",
                fix=f"{fix}, or set another folder, " + as_set(run_dir="FOLDER"),
            ) from error

    def _add(self, name: str, tensors: Tensors, skeleton: Json) -> None:
        slices = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, TensorSlice)}
        whole_tensors = {key: tensor for key, tensor in tensors.items() if key not in slices}
        if slices and self._world_size == 1:
            raise CheckpointError(
                f"'{name}.{next(iter(slices))}' can't be saved: it is a slice of a tensor, and other "
                "ranks have the other slices",
                fix="assemble it with `eventloop.toolbox.gathered`",
            )
        if slices:
            self._sharded.append(name)
            path = shard_name(name, self._rank)
            self._files[path] = tensor_file.NewTensors(slices, path)
        if self._rank and name != f"rank{self._rank}":
            return
        if whole_tensors:
            path = f"{name}.safetensors"
            self._files[path] = tensor_file.NewTensors(whole_tensors, path)
        # With tensors in two files, only the skeleton keeps the order of the keys.
        if not is_plain(skeleton, tensors) or (slices and whole_tensors):
            self._files[f"{name}.json"] = _fitting(name, disk.to_json, skeleton)

    def _of(self, files: Mapping[str, FileFacts]) -> Manifest:
        shards = dict.fromkeys(self._sharded, self._world_size)
        return Manifest(self._batch, files, self._facts, shards=shards)


def _fitting(name: str, encode: Callable[[Any], bytes], value: Any) -> bytes:
    try:
        return encode(value)
    except CorruptFileError as damage:
        raise CheckpointError(
            f"{name!r} can't be saved: {damage}",
            fix="put long lists of numbers into a tensor: `torch.tensor(numbers)`",
        ) from None
