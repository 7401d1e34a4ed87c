"""Reads parts of a checkpoint: completely, or with tensors that are loaded when needed.

The files' headers say which of them hold a part of a tensor. Files written by ranks near this one
are searched first, so that one of a thousand ranks opens only a few files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint import safetensors_files as tensor_file
from eventloop.checkpoint.encoding import map_leaves
from eventloop.checkpoint.safetensors_files import Box, TensorEntry, bytes_of, dtypes, read_header
from eventloop.checkpoint.verifying import (
    Slices,
    about,
    check_size,
    opened,
    put_together,
    refusing,
    refusing_file,
)
from eventloop.files.disk import CorruptFileError, OldFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eventloop.checkpoint.encoding import Nest
    from eventloop.checkpoint.manifest import FileFacts, Manifest

_CHUNK_BYTES = 16 * 2**20


def read_part(folder: Path, part: str, manifest: Manifest) -> Nest:
    """Reads a whole part; raises CorruptFileError if it isn't what the manifest says."""
    tensors: dict[str, Tensor] = {}
    if name := manifest.parts[part].get(".safetensors"):
        with opened(folder, name, manifest) as file:
            tensors = tensor_file.read(file)
    if part in manifest.shards:
        tensors |= _read_slices(folder, part, manifest)
    return put_together(folder, part, manifest, tensors)


def _read_slices(folder: Path, part: str, manifest: Manifest) -> dict[str, Tensor]:
    """Reads all slices of a part into whole tensors, one slice at a time."""
    tensors: dict[str, Tensor] = {}
    slices = Slices()
    for name in manifest.shards_of(part):
        with opened(folder, name, manifest) as file:
            header = tensor_file.read_header(file, slices=True)
            slices.add(header)
            for tensor, entry, held in tensor_file.read_tensors(file, header):
                if tensor not in tensors:
                    tensors[tensor] = tensor_file.empty(tensor, entry.whole, entry.dtype)
                entry.box.of(tensors[tensor]).copy_(held)
    slices.require_whole()
    return tensors


def saved_tensors(
    folder: Path, part: str, manifest: Manifest, nearest: float = 0.0
) -> dict[str, SavedTensor]:
    """Returns the tensors of a verified part by name, not loaded; see `TensorFiles`."""
    whole = manifest.parts[part].get(".safetensors")
    shards = manifest.shards_of(part)
    return TensorFiles(folder, whole, shards, manifest.files, nearest).tensors()


class SavedTensor:
    """A tensor in a file, or in the files of a verified checkpoint; loaded on request.

    Attributes:
        name: its name in the files.
        shape: of the whole tensor.
        dtype: of its entries.
        ndim, nbytes: of the whole.
        is_in_slices: whether it was saved in slices, one per rank.
    """

    def __init__(
        self, name: str, entry: TensorEntry, files: TensorFiles, *, is_in_slices: bool = False
    ) -> None:
        self.name = name
        self.is_in_slices = is_in_slices
        self.shape = entry.whole
        self.dtype: torch.dtype = dtypes()[entry.dtype]
        self.ndim = len(entry.whole)
        self.nbytes = math.prod(entry.whole) * self.dtype.itemsize
        self._files = files

    def read(self) -> Tensor:
        """Loads the whole tensor, on the host; raises what `read_slice` does."""
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Loads a part of the tensor, on the host, without reading the rest.

        Args:
            offsets: where the part starts in the whole tensor, one number per dimension.
            shape: of the part.

        Raises:
            CheckpointError, TaskError: its file has changed since it was opened or verified.
        """
        import torch

        part = torch.empty(tuple(shape), dtype=self.dtype)
        if part.numel():
            self._files.fill(self, Box(tuple(offsets), tuple(shape)), part)
        return part


class TensorFiles:
    """The files with the tensors of a part: one of `whole` ones, and `shards` in order of the ranks.

    Args:
        facts: size and digest of each file; None for a file outside of a checkpoint.
        nearest: where to look first, as a fraction of all ranks in [0, 1).
    """

    def __init__(
        self,
        folder: Path,
        whole: str | None,
        shards: Sequence[str],
        facts: Mapping[str, FileFacts] | None,
        nearest: float = 0.0,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._shards = frozenset(shards)
        middle = nearest * len(shards)
        ordered = sorted(range(len(shards)), key=lambda idx: abs(idx + 0.5 - middle))
        # Whole tensors first: what is there is there alone.
        self._names = [*([whole] if whole else []), *(shards[idx] for idx in ordered)]
        self._known: dict[str, tuple[dict[str, TensorEntry], int]] = {}

    def tensors(self) -> dict[str, SavedTensor]:
        """Returns all tensors by name; each file of slices lists every sliced tensor."""
        found: dict[str, SavedTensor] = {}
        named = [name for name in self._names if name not in self._shards]
        for name in [*named, *self._names[len(named) : len(named) + 1]]:
            for tensor, entry in self._header(name).items():
                found[tensor] = SavedTensor(tensor, entry, self, is_in_slices=name in self._shards)
        return found

    def fill(self, tensor: SavedTensor, wanted: Box, into: Tensor) -> None:
        """Reads a box into a tensor of the same shape; raises CheckpointError or TaskError."""
        num_left = math.prod(wanted.shape)
        pieces: list[Box] = []
        with self._refusing():
            for name in self._names:
                if (entry := self._header(name).get(tensor.name)) is None:
                    continue
                self._require_same(tensor, entry, name)
                if (shared := entry.box.meets(wanted)) is None:
                    continue
                if any(shared.meets(piece) for piece in pieces):
                    raise CorruptFileError(f"two slices of {tensor.name[:80]!r} overlap")
                pieces.append(shared)
                self._copy(name, entry, shared.inside(entry.box), shared.inside(wanted).of(into))
                num_left -= math.prod(shared.shape)
                if num_left <= 0:
                    return
            raise CorruptFileError(
                f"{num_left:,} entries of {tensor.name[:80]!r} are in none of its files"
            )

    def _refusing(self) -> AbstractContextManager[None]:
        if self._facts is None:
            return refusing_file(self._folder / self._names[0])
        return refusing(self._folder)

    def _header(self, name: str) -> dict[str, TensorEntry]:
        if name not in self._known:
            with self._opened(name) as file:
                header = read_header(file, slices=name in self._shards)
                self._known[name] = header, file.num_bytes - file.num_left
        return self._known[name][0]

    def _copy(self, name: str, entry: TensorEntry, part: Box, into: Tensor) -> None:
        """Copies a part of an entry; one that isn't contiguous, some rows at a time."""
        import torch

        num_bytes = entry.end - entry.start
        held = entry.box.shape
        row_bytes = num_bytes // held[0] if held else num_bytes
        first, num_rows = (part.offsets[0], part.shape[0]) if held else (0, 1)
        start = self._known[name][1] + entry.start + first * row_bytes
        with self._opened(name) as file:
            if part.shape[1:] == held[1:] and into.is_contiguous():
                file.fill_at(bytes_of(into), start)
                return
            at_once = max(1, _CHUNK_BYTES // row_bytes)
            for row in range(0, num_rows, at_once):
                num = min(at_once, num_rows - row)
                rows = torch.empty((num, *held[1:]), dtype=into.dtype)
                file.fill_at(bytes_of(rows), start + row * row_bytes)
                wanted = Box((0, *part.offsets[1:]), (num, *part.shape[1:]))
                into.narrow(0, row, num).copy_(wanted.of(rows))

    @contextmanager
    def _opened(self, name: str) -> Iterator[OldFile]:
        with about(name), OldFile(self._folder / name) as file:
            if self._facts is not None:
                check_size(file.num_bytes, self._facts[name])
            yield file

    @staticmethod
    def _require_same(tensor: SavedTensor, entry: TensorEntry, name: str) -> None:
        if entry.whole != tensor.shape or dtypes()[entry.dtype] != tensor.dtype:
            raise CorruptFileError(f"{name}: {tensor.name[:80]!r} is another tensor there")


def read_all(nest: Any, *, but_slices: bool = False) -> Any:
    """Returns a nest with every `SavedTensor` loaded, but those in slices if `but_slices`."""

    def read(one: Any) -> Any:
        is_read = isinstance(one, SavedTensor) and not (but_slices and one.is_in_slices)
        return one.read() if is_read else one

    return map_leaves(nest, read)
