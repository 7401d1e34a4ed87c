"""The weights of a checkpoint, alone: copied to a file of their own; needs no torch and no task."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.tensor_header import read_header
from eventloop.checkpoint.verifying import (
    checked_manifest,
    facts_in,
    opened,
    put_together,
    why_passed_over,
)
from eventloop.errors import CheckpointError, EventloopError
from eventloop.files import disk
from eventloop.files.corruption import CorruptFileError

if TYPE_CHECKING:
    from eventloop.checkpoint.manifest import Manifest

PART = "model"


def export_weights(checkpoint: Path, path: Path) -> tuple[list[str], list[str]]:
    """Copies the weights of a checkpoint to a safetensors file, which is there as a whole or not.

    Args:
        path: of the file; one that is there is replaced.

    Returns:
        The names of the tensors, and those of other values of the model, which are left out.

    Raises:
        CheckpointError: they aren't as they were written, or aren't finite.
        EventloopError: the file can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        manifest = checked_manifest(checkpoint)
        if reason := why_passed_over(facts_in(manifest)):
            raise CheckpointError(
                f"{checkpoint.name} isn't exported: {reason}",
                fix="export an earlier checkpoint; to look at these weights, open "
                f"{str(checkpoint / f'{PART}.safetensors')!r}",
            )
        names = _copy(checkpoint, manifest, temporary)
        others = _others(checkpoint, manifest, names)
        temporary.replace(path)
        disk.sync_folder(path.parent)
    except CorruptFileError as damage:
        raise CheckpointError(
            f"the weights of the checkpoint {str(checkpoint)!r} can't be used: {damage}",
            fix=damage.fix or "take another checkpoint, or an earlier copy of this one",
        ) from damage
    except OSError as error:
        raise EventloopError(
            f"the weights can't be written to {str(path)!r}: {error.strerror}",
            fix="give another file, or free space",
        ) from error
    finally:
        with suppress(FileNotFoundError):
            disk.remove_file(temporary)
    return names, others


def _copy(checkpoint: Path, manifest: Manifest, path: Path) -> list[str]:
    """Copies the file of the tensors, and gives their names."""
    name = _files(manifest).get(".safetensors")
    if name is None:
        raise CorruptFileError(
            f"it has no tensors in a part {PART!r}, only {', '.join(manifest.parts)}"
        )
    with opened(checkpoint, name, manifest) as file, disk.NewFile(path) as copy:
        while file.num_left:
            copy.write(file.read(min(disk.CHUNK_BYTES, file.num_left)))
    with disk.OldFile(path) as written:
        return list(read_header(written))


def _others(checkpoint: Path, manifest: Manifest, names: list[str]) -> list[str]:
    """Returns the paths of what is not a tensor."""
    tensor = object()
    nest = put_together(checkpoint, _files(manifest), manifest, dict.fromkeys(names, tensor))
    return [path for path, value in _leaves("", nest) if value is not tensor]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    branches: Any = ()
    if isinstance(value, Mapping):
        branches = value.items()
    elif isinstance(value, list | tuple):
        branches = enumerate(value)
    else:
        yield path, value
    for key, one in branches:
        yield from _leaves(f"{path}.{key}" if path else str(key), one)


def _files(manifest: Manifest) -> dict[str, str]:
    return manifest.parts.get(PART, {})
