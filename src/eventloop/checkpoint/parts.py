"""A part of a checkpoint, read: whole, or with its tensors left in their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from eventloop.checkpoint import tensors as tensor_file
from eventloop.checkpoint.saved_tensors import SavedTensor, TensorFiles
from eventloop.checkpoint.tiling import Slices
from eventloop.checkpoint.verifying import opened, put_together, require_part
from eventloop.training.slices import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

    from eventloop.checkpoint.encoding import Nest
    from eventloop.checkpoint.manifest import Manifest


def read_part(folder: Path, part: str, manifest: Manifest) -> Nest:
    """Reads a part whole, and verifies it.

    Raises:
        CorruptFileError: it isn't what the manifest says.
    """
    files = manifest.parts[part]
    tensors: dict[str, Tensor] = {}
    if name := files.get(".safetensors"):
        with opened(folder, name, manifest) as file:
            tensors = tensor_file.read(file)
    if part in manifest.shards:
        tensors |= _read_slices(folder, part, manifest)
    return put_together(folder, files, manifest, tensors)


def _read_slices(folder: Path, part: str, manifest: Manifest) -> dict[str, Tensor]:
    """Reads all slices of a part into whole tensors; one slice at a time is in memory beside them."""
    tensors: dict[str, Tensor] = {}
    slices = Slices()
    for name in manifest.shards_of(part):
        with opened(folder, name, manifest) as file:
            header = tensor_file.read_header(file, slices=True)
            slices.add(header)
            for tensor, entry, held in tensor_file.read_tensors(file, header):
                if tensor not in tensors:
                    tensors[tensor] = tensor_file.empty(tensor, entry.whole, entry.dtype)
                TensorSlice(held, entry.whole, entry.offsets).put_into(tensors[tensor])
    slices.require_whole()
    return tensors


def read_left(folder: Path, part: str, manifest: Manifest, nearest: float) -> Nest:
    """Reads what a part has beside its tensors, which stay in their files.

    Args:
        nearest: as `TensorFiles` takes it.

    Raises:
        CorruptFileError: it isn't what the manifest says.
    """
    files, shards = manifest.parts[part], manifest.shards_of(part)
    whole = files.get(".safetensors")
    saved = TensorFiles(folder, whole, shards, manifest.files, nearest).tensors()
    return put_together(folder, files, manifest, saved)


def saved_tensors(folder: Path, part: str, manifest: Manifest) -> dict[str, SavedTensor]:
    """Verifies a part and returns its tensors by name, which stay in their files.

    Raises:
        CorruptFileError: it isn't what the manifest says.
    """
    require_part(folder, part, manifest)
    whole, shards = manifest.parts[part].get(".safetensors"), manifest.shards_of(part)
    return TensorFiles(folder, whole, shards, manifest.files).tensors()
