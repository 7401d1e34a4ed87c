"""The header of a file of tensors: which there are, of which kind, and where; needs no torch.

The layout is that of safetensors: the length of the header, in 8 bytes; the header, a JSON object
with dtype, shape and offsets of each tensor; their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop.files import bounded_json
from eventloop.files.corruption import CorruptFileError

if TYPE_CHECKING:
    from eventloop.files.disk import OldFile

METADATA = "__metadata__"
MAX_DIMENSIONS = 64
MAX_ITEMS = 1_000_000  # in the header: eight a tensor with two dimensions
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: what it is, and where its bytes start and end after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(file: OldFile) -> dict[str, Entry]:
    """Reads the header; its entries cover the rest of the file without gaps.

    Raises:
        CorruptFileError: it isn't that of a whole safetensors file.
    """
    length = int.from_bytes(file.read(8), "little")
    if length > min(file.num_left, bounded_json.MAX_BYTES):
        raise CorruptFileError(f"its header claims {length:,} bytes")
    value = bounded_json.from_bytes(file.read(length), MAX_ITEMS)
    if not isinstance(value, dict):
        raise CorruptFileError("its header isn't a JSON object")
    value.pop(METADATA, None)
    header = {name: _entry(name, one) for name, one in value.items()}
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


def read_names(file: OldFile) -> list[str]:
    """Reads a whole file, but keeps only the names of its tensors.

    Raises:
        CorruptFileError: it isn't a whole safetensors file.
    """
    names = list(read_header(file))
    file.skip()
    return names


def by_offset(header: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """Returns the entries in the order of their bytes."""
    return sorted(header.items(), key=lambda one: (one[1].start, one[1].end))


def _entry(name: str, value: Any) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            sizes = [one for one in shape if type(one) is int and 0 <= one < 2**63]
            num_entries = math.prod(one or 1 for one in sizes[:MAX_DIMENSIONS])
            fits = dtype in ITEM_BYTES and len(shape) == len(sizes) <= MAX_DIMENSIONS
            if fits and num_entries < 2**63 and 0 <= start <= end:
                num_bytes = math.prod(sizes) * ITEM_BYTES[dtype]
                if num_bytes == end - start:
                    return Entry(dtype, tuple(sizes), start, end)
    raise CorruptFileError(f"its header says something impossible of the tensor {name[:80]!r}")
