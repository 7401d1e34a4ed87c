"""Reads and writes safetensors files without a second copy in memory.

A file consists of the length of the header, in 8 bytes; the header, a JSON object with dtype, shape
and offsets of each tensor; and the bytes of the tensors. It is compatible with the library of that
name, which lacks features that checkpoints need: digests of the bytes (by `files/disk.py`), disk
errors with their errno, safely opened files, the order of the tensors, and reading tensor by tensor.

A header can be read without torch, which takes a second to import.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from eventloop.errors import CheckpointError
from eventloop.files import disk
from eventloop.files.disk import CorruptFileError
from eventloop.training.tensor_slices import TensorSlice, held

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eventloop.files.disk import NewFile, OldFile

METADATA = "__metadata__"
SLICES = "slices"  # in the metadata: shape of the whole and offsets by name, as JSON
MAX_DIMENSIONS = 64
MAX_HEADER_ITEMS = 1_000_000  # JSON values in the header: eight for a tensor with two dimensions
# safetensors' names of dtypes, with torch's names and the bytes of an entry.
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


@functools.cache
def dtypes() -> dict[str, torch.dtype]:
    """Returns torch's dtypes by safetensors' names."""
    import torch

    return {name: getattr(torch, torch_name) for name, (torch_name, _) in _DTYPES.items()}


@functools.cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in dtypes().items()}


class NewTensors:
    """Tensors to be written; the header exists, so the size is known.

    Args:
        tensors: by name, on any device and in any memory layout; each is copied to the host when
            it is written. Tensors that share memory are written separately. The header has the
            offsets of slices; a file has only slices, or no slices.
        path: the name of the file in messages.
        read: loads a tensor when it is written, for tensors that aren't in memory.

    Raises:
        CheckpointError: safetensors doesn't support a dtype, or there are too many tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        path: str,
        *,
        read: Callable[[Any], Tensor] = lambda tensor: tensor,
    ) -> None:
        slices = {
            name: tensor for name, tensor in tensors.items() if isinstance(tensor, TensorSlice)
        }
        tensors = held(tensors)
        # Larger dtypes come first, so that all tensors are aligned in a memory-mapped file.
        ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        self._tensors = [tensors[name] for name in ordered]
        self._read = read
        offsets: dict[str, list[int]] = {}
        end = 0
        for name in ordered:
            start = end
            end = end + tensors[name].nbytes
            offsets[name] = [start, end]
        header: dict[str, Any] = {METADATA: {"format": "pt"} | _places_of(slices)}
        for name, tensor in tensors.items():
            header[name] = _described(tensor, f"{path}: {name}") | {"data_offsets": offsets[name]}
        try:
            text = disk.to_json(header, MAX_HEADER_ITEMS)
        except CorruptFileError as error:
            raise CheckpointError(
                f"{len(tensors):,} tensors can't be saved in {path!r}: {error}",
                fix="join small tensors, for example with `torch.cat`",
            ) from None
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.num_bytes = len(self._header) + end

    def write(self, file: NewFile) -> None:
        """Writes header and tensors to a new file."""
        file.write(self._header)
        for tensor in self._tensors:
            host = self._read(tensor).resolve_conj().resolve_neg().cpu().contiguous()
            file.write(bytes_of(host))


def read(file: OldFile) -> dict[str, Tensor]:
    """Reads all tensors of a file to the host, by name, in the order of its header.

    Raises:
        CorruptFileError: the file isn't complete; raised before memory is allocated.
    """
    header = read_header(file)
    tensors = {name: tensor for name, _, tensor in read_tensors(file, header)}
    return {name: tensors[name] for name in header}


def read_tensors(
    file: OldFile, header: Mapping[str, TensorEntry]
) -> Iterator[tuple[str, TensorEntry, Tensor]]:
    """Yields the name, entry and tensor of each entry, in the order of their bytes."""
    for name, entry in by_offset(header):
        tensor = empty(name, entry.box.shape, entry.dtype)
        file.fill(bytes_of(tensor))
        yield name, entry, tensor


def empty(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns an uninitialised tensor on the host.

    Raises:
        CorruptFileError: there isn't enough memory.
    """
    import torch

    try:
        return torch.empty(shape, dtype=dtypes()[dtype])
    except RuntimeError as error:
        raise CorruptFileError(f"not enough memory for the tensor {name[:80]!r}") from error


class Box(NamedTuple):
    """A rectangular part of a tensor: the offsets of its first entry, and its shape."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def meets(self, other: Box) -> Box | None:
        """Returns the intersection with another box, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, shape) if all(length > 0 for length in shape) else None

    def inside(self, outer: Box) -> Box:
        """Returns this box with offsets relative to an enclosing box."""
        pairs = zip(self.offsets, outer.offsets, strict=True)
        return Box(
            tuple(inner_start - outer_start for inner_start, outer_start in pairs), self.shape
        )

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of a tensor as a view."""
        for dim, (start, length) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def _ends(self) -> Iterator[int]:
        return (start + length for start, length in zip(*self, strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, or a slice of one.

    Attributes:
        dtype: safetensors' name of the dtype.
        box: the part of the whole tensor that is in the file.
        start, end: the range of its bytes after the header.
        whole: the shape of the whole tensor.
    """

    dtype: str
    box: Box
    start: int
    end: int
    whole: tuple[int, ...]


def read_header(file: OldFile, *, slices: bool = False) -> dict[str, TensorEntry]:
    """Reads the header.

    Args:
        file: opened at its beginning.
        slices: whether the file has slices.

    Raises:
        CorruptFileError: the entries don't cover the file without gaps, or slices lack offsets.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(file.num_left, disk.MAX_JSON_BYTES):
        raise CorruptFileError(f"it isn't a safetensors file: its header claims {length:,} bytes")
    # This module writes ASCII, but other programs write UTF-8.
    value = disk.from_json(file.read(length), MAX_HEADER_ITEMS, "utf-8")
    if not isinstance(value, dict):
        raise CorruptFileError("its header isn't a JSON object")
    metadata = value.pop(METADATA, None)
    header = {name: _entry(name, fields) for name, fields in value.items()}
    if slices:
        header = _with_places(header, metadata)
    end = 0
    for name, entry in by_offset(header):
        if entry.start != end:
            raise CorruptFileError(
                f"the tensor {name[:80]!r} doesn't start where the previous tensor ends"
            )
        end = entry.end
    if end != file.num_left:
        raise CorruptFileError(f"its tensors need {end:,} bytes, but it has {file.num_left:,}")
    return header


def read_entries(file: OldFile, *, slices: bool = False) -> dict[str, TensorEntry]:
    """Reads a whole file, for its digest, and returns the entries of its header."""
    header = read_header(file, slices=slices)
    file.skip()
    return header


def by_offset(header: Mapping[str, TensorEntry]) -> list[tuple[str, TensorEntry]]:
    """Returns the entries in the order of their bytes."""
    return sorted(header.items(), key=lambda item: (item[1].start, item[1].end))


def _entry(name: str, value: Any) -> TensorEntry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            sizes = [size for size in shape if type(size) is int and 0 <= size < 2**63]
            num_entries = math.prod(size or 1 for size in sizes[:MAX_DIMENSIONS])
            fits = dtype in _DTYPES and len(shape) == len(sizes) <= MAX_DIMENSIONS
            if fits and num_entries < 2**63 and 0 <= start <= end:
                num_bytes = math.prod(sizes) * _DTYPES[dtype][1]
                if num_bytes == end - start:
                    box = Box((0,) * len(sizes), tuple(sizes))
                    return TensorEntry(dtype, box, start, end, box.shape)
    raise CorruptFileError(f"invalid header entry for tensor {name[:80]!r}")


def _places_of(slices: Mapping[str, TensorSlice]) -> dict[str, str]:
    if not slices:
        return {}
    bounds = {
        name: [list(tensor_slice.shape), list(tensor_slice.offsets)]
        for name, tensor_slice in slices.items()
    }
    return {SLICES: disk.to_json(bounds, MAX_HEADER_ITEMS).decode("ascii")}


def _with_places(header: Mapping[str, TensorEntry], metadata: Any) -> dict[str, TensorEntry]:
    text = metadata.get(SLICES) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CorruptFileError("its header lacks the offsets of its slices")
    bounds = disk.from_json(text.encode("ascii", "replace"), MAX_HEADER_ITEMS)
    if not isinstance(bounds, dict) or bounds.keys() != header.keys():
        raise CorruptFileError("its header has the offsets of other tensors")
    return {name: _with_slice(name, entry, bounds[name]) for name, entry in header.items()}


def _with_slice(name: str, entry: TensorEntry, bound: Any) -> TensorEntry:
    match bound:
        case [list(whole_shape), list(offsets)] if (
            len(whole_shape) == len(offsets) == len(entry.whole)
        ):
            sizes = [
                size for size in (*whole_shape, *offsets) if type(size) is int and 0 <= size < 2**63
            ]
            ends = zip(offsets, entry.box.shape, whole_shape, strict=True)
            is_inside = len(sizes) == 2 * len(whole_shape) and all(
                offset + num <= end for offset, num, end in ends
            )
            if is_inside and math.prod(size or 1 for size in whole_shape) < 2**63:
                return replace(
                    entry, whole=tuple(whole_shape), box=Box(tuple(offsets), entry.box.shape)
                )
    raise CorruptFileError(f"invalid header entry for slice {name[:80]!r}")


def _described(tensor: Any, path: str) -> dict[str, Any]:
    if tensor.dtype not in _names() or tensor.ndim > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{path!r} can't be saved: safetensors has no {tensor.dtype} of {tensor.ndim} dimensions",
            fix="save it in another form, such as `torch.view_as_real(complex_tensor)`",
        )
    return {"dtype": _names()[tensor.dtype], "shape": list(tensor.shape)}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host, valid while the tensor exists.

    `Tensor.numpy` isn't used, because `--check` would count it as a read by the loop.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
