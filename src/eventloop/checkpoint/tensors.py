"""Files of tensors: safetensors, written and read without a second copy in memory.

The layout is the length of the header, in 8 bytes; the header, a JSON object with dtype, shape and
offsets of each tensor; their bytes. The library of that name reads what is written here, and the
other way round. It can't be used itself for what checkpoints need: digests of exactly the bytes that
were written or read, errors of the disk with their numbers, files that were opened with care, the
order of the tensors, and memory for one tensor instead of all.

What a header says can be read without torch, which takes a second to import.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eventloop.errors import CheckpointError
from eventloop.files import bounded_json
from eventloop.files.disk import CorruptFileError
from eventloop.training.slices import TensorSlice, held

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from eventloop.files.disk import NewFile, OldFile

METADATA = "__metadata__"
SLICES = "slices"  # in the metadata: shape of the whole and offsets by name, as JSON
MAX_DIMENSIONS = 64
MAX_ITEMS = 1_000_000  # in the header: eight a tensor with two dimensions
# The names of safetensors, with torch's and the bytes of an entry.
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
    """Returns torch's dtypes by their names in a file."""
    import torch

    return {name: getattr(torch, torchs) for name, (torchs, _) in _DTYPES.items()}


@functools.cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in dtypes().items()}


class Draft:
    """Tensors that are to be written: their header is ready, so that their size is known.

    Args:
        tensors: by name, on any device and in any layout in memory; each is copied to the host
            when its turn comes. Those that share memory are written one by one. Slices come with
            their places in the header; they are all the file has, or it has none.
        path: what the file is called in messages.
        read: returns one of the tensors when its turn comes, for those that are somewhere else.

    Raises:
        CheckpointError: safetensors has no such dtype, or there are too many tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        path: str,
        *,
        read: Callable[[Any], Tensor] = lambda tensor: tensor,
    ) -> None:
        slices = {name: one for name, one in tensors.items() if isinstance(one, TensorSlice)}
        tensors = held(tensors)
        # Larger entries first: then all are aligned for those who map the file into memory.
        ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        self._tensors = [tensors[name] for name in ordered]
        self._read = read
        offsets: dict[str, list[int]] = {}
        end = 0
        for name in ordered:
            start, end = end, end + tensors[name].nbytes
            offsets[name] = [start, end]
        header: dict[str, Any] = {METADATA: {"format": "pt"} | _places_of(slices)}
        for name, tensor in tensors.items():
            header[name] = _described(tensor, f"{path}: {name}") | {"data_offsets": offsets[name]}
        try:
            text = bounded_json.to_bytes(header, MAX_ITEMS)
        except CorruptFileError as error:
            raise CheckpointError(
                f"{len(tensors):,} tensors can't be saved in {path!r}: {error}",
                fix="put many small tensors together, with `torch.cat`, say",
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
    """Reads a whole file: its tensors by name, in the order of its header, on the host.

    Raises:
        CorruptFileError: it isn't a whole safetensors file; nothing is allocated before that is known.
    """
    header = read_header(file)
    tensors = {name: tensor for name, _, tensor in read_tensors(file, header)}
    return {name: tensors[name] for name in header}


def read_tensors(file: OldFile, header: Mapping[str, Entry]) -> Iterator[tuple[str, Entry, Tensor]]:
    """Reads what follows the header: each tensor with its name, in the order of their bytes.

    Raises:
        CorruptFileError: there is no memory for one.
    """
    for name, entry in by_offset(header):
        tensor = empty(name, entry.shape, entry.dtype)
        file.fill(bytes_of(tensor))
        yield name, entry, tensor


def empty(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns a tensor on the host that is to be filled.

    Raises:
        CorruptFileError: there is no memory for it.
    """
    import torch

    try:
        return torch.empty(shape, dtype=dtypes()[dtype])
    except RuntimeError as error:
        raise CorruptFileError(f"there is no memory for the tensor {name[:80]!r}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file, or a slice of one.

    Attributes:
        dtype: by the name that safetensors has for it.
        shape: of what the file holds.
        start, end: where its bytes are, after the header.
        whole: the shape of the tensor that it is a slice of; its own, if it is whole.
        offsets: where in the whole its first entry stands.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    whole: tuple[int, ...]
    offsets: tuple[int, ...]


def read_header(file: OldFile, *, slices: bool = False) -> dict[str, Entry]:
    """Reads the header; its entries cover the rest of the file without gaps.

    Args:
        slices: whether the file is one of slices.

    Raises:
        CorruptFileError: it isn't that of a whole safetensors file, or doesn't say where slices
            belong.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(file.num_left, bounded_json.MAX_BYTES):
        raise CorruptFileError(f"it isn't a safetensors file: its header claims {length:,} bytes")
    value = bounded_json.from_bytes(file.read(length), MAX_ITEMS, "utf-8")  # of other writers
    if not isinstance(value, dict):
        raise CorruptFileError("its header isn't a JSON object")
    metadata = value.pop(METADATA, None)
    header = {name: _entry(name, one) for name, one in value.items()}
    if slices:
        header = _with_places(header, metadata)
    end = 0
    for name, entry in by_offset(header):
        if entry.start != end:
            raise CorruptFileError(
                f"the tensor {name[:80]!r} doesn't start where the one before it ends"
            )
        end = entry.end
    if end != file.num_left:
        raise CorruptFileError(
            f"its tensors claim {end:,} bytes, of which {file.num_left:,} are there"
        )
    return header


def read_entries(file: OldFile, *, slices: bool = False) -> dict[str, Entry]:
    """Reads a whole file, but keeps only what its header says.

    Raises:
        CorruptFileError: as `read_header` does.
    """
    header = read_header(file, slices=slices)
    file.skip()
    return header


def by_offset(header: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Returns the entries in the order of their bytes."""
    return sorted(header.items(), key=lambda one: (one[1].start, one[1].end))


def _entry(name: str, value: Any) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            sizes = [one for one in shape if type(one) is int and 0 <= one < 2**63]
            num_entries = math.prod(one or 1 for one in sizes[:MAX_DIMENSIONS])
            fits = dtype in _DTYPES and len(shape) == len(sizes) <= MAX_DIMENSIONS
            if fits and num_entries < 2**63 and 0 <= start <= end:
                num_bytes = math.prod(sizes) * _DTYPES[dtype][1]
                if num_bytes == end - start:
                    return Entry(dtype, tuple(sizes), start, end, tuple(sizes), (0,) * len(sizes))
    raise CorruptFileError(f"its header says something impossible of the tensor {name[:80]!r}")


def _places_of(slices: Mapping[str, TensorSlice]) -> dict[str, str]:
    if not slices:
        return {}
    places = {name: [list(one.shape), list(one.offsets)] for name, one in slices.items()}
    return {SLICES: bounded_json.to_bytes(places, MAX_ITEMS).decode("ascii")}


def _with_places(header: Mapping[str, Entry], metadata: Any) -> dict[str, Entry]:
    text = metadata.get(SLICES) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise CorruptFileError("its header doesn't say where its slices belong")
    places = bounded_json.from_bytes(text.encode("ascii", "replace"), MAX_ITEMS)
    if not isinstance(places, dict) or places.keys() != header.keys():
        raise CorruptFileError("its header says of other tensors where they belong")
    return {name: _placed(name, one, places[name]) for name, one in header.items()}


def _placed(name: str, entry: Entry, place: Any) -> Entry:
    match place:
        case [list(whole), list(offsets)] if len(whole) == len(offsets) == len(entry.shape):
            sizes = [one for one in (*whole, *offsets) if type(one) is int and 0 <= one < 2**63]
            ends = zip(offsets, entry.shape, whole, strict=True)
            is_inside = len(sizes) == 2 * len(whole) and all(
                at + num <= end for at, num, end in ends
            )
            if is_inside and math.prod(one or 1 for one in whole) < 2**63:
                return replace(entry, whole=tuple(whole), offsets=tuple(offsets))
    raise CorruptFileError(f"its header says something impossible of the slice {name[:80]!r}")


def _described(tensor: Any, path: str) -> dict[str, Any]:
    if tensor.dtype not in _names() or tensor.ndim > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{path!r} can't be saved: safetensors has no {tensor.dtype} of {tensor.ndim} dimensions",
            fix="save it as another tensor, `torch.view_as_real(complex_tensor)`, say",
        )
    return {"dtype": _names()[tensor.dtype], "shape": list(tensor.shape)}


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host; good as long as the tensor is there.

    `Tensor.numpy` would do it, too, but counts as a read by the loop where reads are watched.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
