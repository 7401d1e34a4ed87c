"""Reads parts of a checkpoint: completely, or with tensors that are loaded when needed.

The headers of the files say which entries of a tensor they contain. Files written by neighbouring
ranks are searched first, so that each of a thousand ranks opens only a few files.
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
    """Reads a whole part.

    Raises:
        CorruptFileError: its files don't match the manifest.
    """
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
            for tensor, entry, slice_entries in tensor_file.read_tensors(file, header):
                if tensor not in tensors:
                    tensors[tensor] = tensor_file.empty(tensor, entry.whole, entry.dtype)
                entry.box.of(tensors[tensor]).copy_(slice_entries)
    slices.require_whole()
    return tensors


def saved_tensors(
    folder: Path, part: str, manifest: Manifest, nearest: float = 0.0
) -> dict[str, SavedTensor]:
    """Returns the tensors of a verified part by name, to be loaded lazily; see `TensorFiles`."""
    whole_file = manifest.parts[part].get(".safetensors")
    shards = manifest.shards_of(part)
    return TensorFiles(folder, whole_file, shards, manifest.files, nearest).tensors()


class SavedTensor:
    """A tensor in a file, or in the files of a verified checkpoint; loaded on request.

    Attributes:
        name: the name of the tensor in the files.
        shape: the shape of the whole tensor.
        dtype: the dtype of the tensor.
        ndim, nbytes: number of dimensions and size of the whole tensor.
        is_in_slices: whether it was saved in slices, a slice per rank.
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
        """Loads the whole tensor to the host; errors are those of `read_slice`."""
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Loads a part of the tensor to the host, without reading other entries.

        Args:
            offsets: the position of the part in the whole tensor, a number per dimension.
            shape: the shape of the part.

        Raises:
            CheckpointError, TaskError: a file has changed since it was opened or verified.
        """
        import torch

        entries = torch.empty(tuple(shape), dtype=self.dtype)
        if entries.numel():
            self._files.fill(self, Box(tuple(offsets), tuple(shape)), entries)
        return entries


class TensorFiles:
    """The files with the tensors of a part.

    Args:
        folder: of the files.
        whole_file: the file of whole tensors, if any.
        shards: the files of slices, in order of the ranks.
        facts: size and digest of each file; None for a file outside of a checkpoint.
        nearest: the position among the ranks, in [0, 1), where to look first.
    """

    def __init__(
        self,
        folder: Path,
        whole_file: str | None,
        shards: Sequence[str],
        facts: Mapping[str, FileFacts] | None,
        nearest: float = 0.0,
    ) -> None:
        self._folder = folder
        self._facts = facts
        self._shards = frozenset(shards)
        middle = nearest * len(shards)
        ordered = sorted(range(len(shards)), key=lambda idx: abs(idx + 0.5 - middle))
        # A whole tensor is stored only once, so look there first.
        self._names = [*([whole_file] if whole_file else []), *(shards[idx] for idx in ordered)]
        # By file name, the header and its size in bytes.
        self._headers: dict[str, tuple[dict[str, TensorEntry], int]] = {}

    def tensors(self) -> dict[str, SavedTensor]:
        """Returns all tensors by name.

        Every file of slices lists all sliced tensors, so only one of these files is opened.
        """
        saved_tensors: dict[str, SavedTensor] = {}
        whole_files = [name for name in self._names if name not in self._shards]
        for name in [*whole_files, *self._names[len(whole_files) : len(whole_files) + 1]]:
            for tensor, entry in self._header(name).items():
                saved_tensors[tensor] = SavedTensor(
                    tensor, entry, self, is_in_slices=name in self._shards
                )
        return saved_tensors

    def fill(self, tensor: SavedTensor, box: Box, target: Tensor) -> None:
        """Reads a box of a tensor into a target of the same shape.

        Raises:
            CheckpointError, TaskError: a file has changed, or the slices don't cover the box.
        """
        num_left = math.prod(box.shape)
        pieces: list[Box] = []
        with self._refusing():
            for name in self._names:
                if (entry := self._header(name).get(tensor.name)) is None:
                    continue
                self._require_same(tensor, entry, name)
                if (shared := entry.box.meets(box)) is None:
                    continue
                if any(shared.meets(piece) for piece in pieces):
                    raise CorruptFileError(f"two slices of {tensor.name[:80]!r} overlap")
                pieces.append(shared)
                self._copy(name, entry, shared.inside(entry.box), shared.inside(box).of(target))
                num_left -= math.prod(shared.shape)
                if num_left <= 0:
                    return
            raise CorruptFileError(f"{num_left:,} entries of {tensor.name[:80]!r} are in no file")

    def _refusing(self) -> AbstractContextManager[None]:
        if self._facts is None:
            return refusing_file(self._folder / self._names[0])
        return refusing(self._folder)

    def _header(self, name: str) -> dict[str, TensorEntry]:
        if name not in self._headers:
            with self._opened(name) as file:
                header = read_header(file, slices=name in self._shards)
                self._headers[name] = header, file.num_bytes - file.num_left
        return self._headers[name][0]

    def _copy(self, name: str, entry: TensorEntry, box: Box, target: Tensor) -> None:
        """Copies a box of an entry into a target; if it isn't contiguous, some rows at a time."""
        import torch

        num_bytes = entry.end - entry.start
        shape = entry.box.shape
        row_bytes = num_bytes // shape[0] if shape else num_bytes
        first_row, num_rows = (box.offsets[0], box.shape[0]) if shape else (0, 1)
        start = self._headers[name][1] + entry.start + first_row * row_bytes
        with self._opened(name) as file:
            if box.shape[1:] == shape[1:] and target.is_contiguous():
                file.fill_at(bytes_of(target), start)
                return
            rows_per_chunk = max(1, _CHUNK_BYTES // row_bytes)
            for row in range(0, num_rows, rows_per_chunk):
                num = min(rows_per_chunk, num_rows - row)
                rows = torch.empty((num, *shape[1:]), dtype=target.dtype)
                file.fill_at(bytes_of(rows), start + row * row_bytes)
                chunk_box = Box((0, *box.offsets[1:]), (num, *box.shape[1:]))
                target.narrow(0, row, num).copy_(chunk_box.of(rows))

    @contextmanager
    def _opened(self, name: str) -> Iterator[OldFile]:
        with about(name), OldFile(self._folder / name) as file:
            if self._facts is not None:
                check_size(file.num_bytes, self._facts[name])
            yield file

    @staticmethod
    def _require_same(tensor: SavedTensor, entry: TensorEntry, name: str) -> None:
        if entry.whole != tensor.shape or dtypes()[entry.dtype] != tensor.dtype:
            raise CorruptFileError(f"{name}: {tensor.name[:80]!r} has another shape or dtype there")


def read_all(nest: Any, *, but_slices: bool = False) -> Any:
    """Returns a nest with every `SavedTensor` loaded, except sliced ones if `but_slices`."""

    def read(value: Any) -> Any:
        is_read = isinstance(value, SavedTensor) and not (but_slices and value.is_in_slices)
        return value.read() if is_read else value

    return map_leaves(nest, read)
