"""The format of a checkpoint: a folder of parts, safetensors and JSON, and a manifest.

Each part is a nest. Its tensors stand in `NAME.safetensors`; what else there is in `NAME.json`, which
a flat dict of tensors doesn't need. `manifest.json` is written last. Nothing is pickled, nothing is
evaluated.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from eventloop.checkpoint import tensors as tensor_file
from eventloop.checkpoint.encoding import Json, Nest, flatten, is_plain
from eventloop.checkpoint.manifest import (
    FILE,
    FileFacts,
    Manifest,
    is_part_name,
    to_bytes,
)
from eventloop.checkpoint.verifying import (
    batch_of,
    checked_manifest,
    examine,
    name_of,
    opened,
    put_together,
)
from eventloop.errors import CheckpointError
from eventloop.files import bounded_json, disk
from eventloop.files.disk import CorruptFileError
from eventloop.text import as_set

__all__ = ["Checkpoint", "Draft", "batch_of", "examine", "name_of", "read", "verify", "write"]
_BLOCK_BYTES = 4096  # of most file systems; a file takes whole ones


@dataclass(frozen=True)
class Checkpoint:
    """What was read of a checkpoint.

    Attributes:
        path: its folder.
        batch: how many batches the run had had; None for one that belongs to no run.
        facts: what is known of it, without opening its parts.
        parts: by name; those that were asked for.
        eventloop: the version that wrote it.
        names: of all its parts.
    """

    path: Path
    batch: int | None
    facts: dict[str, Any]
    parts: dict[str, Nest]
    eventloop: str
    names: tuple[str, ...]


def write(
    folder: Path,
    parts: Mapping[str, Nest],
    facts: Mapping[str, Any],
    *,
    batch: int | None = None,
) -> None:
    """Writes a checkpoint into a folder, which is made if it isn't there; replaces no file.

    When it returns, all of it would outlive a power failure but for the folder's own name. A folder
    in which it was interrupted has no manifest.

    Args:
        parts: nests by name; names are small letters, digits, `_`, `-` and `.`.
        facts: a nest without tensors, small: it is read to list checkpoints.
        batch: how many batches the run had had.

    Raises:
        CheckpointError: something can't be saved, which is found before anything is written; or the
            disk is full or broken, and the message says how much was needed and is free.
    """
    draft = Draft(parts, facts, batch)
    made: list[Path] = []
    with draft.failing(folder):
        try:
            disk.make_folders(folder)
            draft.write(folder, made)
        except BaseException:
            for path in made:
                with suppress(OSError):  # the first failure is the one to tell of
                    disk.remove_file(path)
            raise


def read(folder: Path, only: Collection[str] | None = None) -> Checkpoint:
    """Reads a checkpoint, or some parts of it; verifies whatever it reads.

    Args:
        only: the names of the parts to read; by default all.

    Raises:
        CheckpointError: it isn't one, is damaged, of a newer version, or lacks a part.
    """
    with _refusing(folder):
        manifest = checked_manifest(folder)
        files = manifest.parts
        wanted = list(files) if only is None else list(only)
        missing = sorted(set(wanted) - files.keys())
        if missing:
            raise CorruptFileError(
                f"it has no part {', '.join(map(repr, missing))}, only {', '.join(files)}"
            )
        parts = {name: _read_part(folder, files[name], manifest) for name in wanted}
        facts = manifest.known
    return Checkpoint(folder, manifest.batch, facts, parts, manifest.eventloop, tuple(files))


def verify(folder: Path) -> dict[str, Any]:
    """Verifies all of a checkpoint and returns its facts.

    Raises:
        CheckpointError: `read` would refuse it.
    """
    with _refusing(folder):
        return examine(folder).known


class Draft:
    """A checkpoint that is to be written: everything that could be wrong with it has been found.

    Args:
        parts, facts, batch: as `write` takes them; tensors aren't copied.

    Attributes:
        num_bytes: what it will take on the disk.

    Raises:
        CheckpointError: something can't be saved.
    """

    def __init__(self, parts: Mapping[str, Nest], facts: Mapping[str, Any], batch: int | None):
        self._batch = batch
        self._files: dict[str, bytes | tensor_file.Draft] = {}
        for name, nest in parts.items():
            if not is_part_name(name):
                raise CheckpointError(
                    f"no part of a checkpoint can be called {name!r}",
                    fix="take small letters, digits, '_', '-' and '.', and not 'manifest'",
                )
            self._add(name, *flatten(nest, name))
        tensors, self._facts = flatten(dict(facts), "facts")
        if tensors:
            raise CheckpointError(
                f"facts.{next(iter(tensors))} is a tensor; facts are read without the parts",
                fix="put it into a part, or save `tensor.item()`",
            )
        unknown = dict.fromkeys(self._files, FileFacts(2**40, "0" * 64))
        sizes = [len(self._manifest(unknown)), *map(_size_of, self._files.values())]
        self.num_bytes = sum(-(-one // _BLOCK_BYTES) * _BLOCK_BYTES for one in [*sizes, 1])

    def write(self, folder: Path, made: list[Path]) -> Manifest:
        """Writes all files into a folder that is there, the manifest last; raises OSError.

        Args:
            made: gets the path of each file as soon as it is there.
        """
        files = {}
        for name, content in self._files.items():
            with disk.NewFile(folder / name) as file:
                made.append(folder / name)
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    content.write(file)
            files[name] = FileFacts(file.num_bytes, file.digest())
        with disk.NewFile(folder / FILE) as file:
            made.append(folder / FILE)
            file.write(self._manifest(files))
        disk.sync_folder(folder)
        return Manifest(self._batch, files, self._facts)

    @contextmanager
    def failing(self, folder: Path) -> Iterator[None]:
        """Refuses to begin without enough space; says of what the disk refuses how much was needed."""
        there = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
        free = disk.num_free_bytes(there)
        if free < self.num_bytes:
            raise self._error(folder, "there isn't enough space", free)
        try:
            yield
        except OSError as error:
            free = disk.num_free_bytes(there)
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = error.strerror or str(error)
            raise self._error(folder, reason, free, is_full=is_full) from error

    def _add(self, name: str, tensors: dict[str, Tensor], skeleton: Json) -> None:
        if tensors:
            path = f"{name}.safetensors"
            self._files[path] = tensor_file.Draft(tensors, path)
        if not is_plain(skeleton, tensors):
            with _too_large(name):
                self._files[f"{name}.json"] = bounded_json.to_bytes(skeleton)

    def _manifest(self, files: Mapping[str, FileFacts]) -> bytes:
        with _too_large("facts"):
            return to_bytes(Manifest(self._batch, files, self._facts))

    def _error(
        self, folder: Path, reason: str, free: int, *, is_full: bool = True
    ) -> CheckpointError:
        fix = "free space" if is_full else f"see what is wrong with {str(folder.parent)!r}"
        return CheckpointError(
            f"the checkpoint can't be written to {str(folder)!r}: {reason}",
            needed=f"{self.num_bytes:,} bytes",
            free=f"{free:,} bytes",
            fix=f"{fix}, or give another folder, {as_set(run_dir='FOLDER')}",
        )


# Reading


def _read_part(folder: Path, files: Mapping[str, str], manifest: Manifest) -> Nest:
    tensors: dict[str, Tensor] = {}
    if name := files.get(".safetensors"):
        with opened(folder, name, manifest) as file:
            tensors = tensor_file.read(file)
    return put_together(folder, files, manifest, tensors)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except CorruptFileError as damage:
        raise CheckpointError(
            f"the checkpoint {str(folder)!r} can't be used: {damage}",
            fix=damage.fix or "take another checkpoint, or an earlier copy of this one",
        ) from damage


# Writing


def _size_of(content: bytes | tensor_file.Draft) -> int:
    return len(content) if isinstance(content, bytes) else content.num_bytes


@contextmanager
def _too_large(name: str) -> Iterator[None]:
    try:
        yield
    except CorruptFileError as damage:
        raise CheckpointError(
            f"{name!r} can't be saved: {damage}",
            fix="put long lists of numbers into a tensor: `torch.tensor(numbers)`",
        ) from None
