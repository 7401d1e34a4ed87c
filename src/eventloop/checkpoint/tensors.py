"""Files of tensors: safetensors, written and read without a second copy in memory.

The library of that name reads what is written here, and the other way round. It can't be used
itself for what checkpoints need: digests of exactly the bytes that were written or read, errors of
the disk with their numbers, files that were opened with care, the order of the tensors, and memory
for one tensor instead of all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.checkpoint.tensor_header import (
    MAX_DIMENSIONS,
    MAX_ITEMS,
    METADATA,
    by_offset,
    read_header,
)
from eventloop.errors import CheckpointError
from eventloop.files import bounded_json
from eventloop.files.corruption import CorruptFileError

if TYPE_CHECKING:
    from eventloop.files.disk import NewFile, OldFile

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Draft:
    """Tensors that are to be written: their header is ready, so that their size is known.

    Args:
        tensors: by name, on any device and in any layout in memory; each is copied to the host
            when its turn comes. Those that share memory are written one by one.
        path: what the file is called in messages.

    Raises:
        CheckpointError: safetensors has no such dtype, or there are too many tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], path: str) -> None:
        # Larger entries first: then all are aligned for those who map the file into memory.
        ordered = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        self._tensors = [tensors[name] for name in ordered]
        offsets: dict[str, list[int]] = {}
        end = 0
        for name in ordered:
            start, end = end, end + tensors[name].nbytes
            offsets[name] = [start, end]
        header: dict[str, Any] = {METADATA: {"format": "pt"}}
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
            held = tensor.resolve_conj().resolve_neg().cpu().contiguous()
            file.write(_bytes_of(held))


def read(file: OldFile) -> dict[str, Tensor]:
    """Reads a whole file: its tensors by name, in the order of its header, on the host.

    Raises:
        CorruptFileError: it isn't a whole safetensors file; nothing is allocated before that is known.
    """
    header = read_header(file)
    tensors = {}
    for name, entry in by_offset(header):
        try:
            raw = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        except RuntimeError as error:
            raise CorruptFileError(f"there is no memory for the tensor {name[:80]!r}") from error
        file.fill(_bytes_of(raw))
        tensors[name] = raw.view(DTYPES[entry.dtype]).reshape(entry.shape)
    return {name: tensors[name] for name in header}


def _described(tensor: Tensor, path: str) -> dict[str, Any]:
    if tensor.dtype not in _NAMES or tensor.ndim > MAX_DIMENSIONS:
        raise CheckpointError(
            f"{path!r} can't be saved: safetensors has no {tensor.dtype} of {tensor.ndim} dimensions",
            fix="save it as another tensor, `torch.view_as_real(complex_tensor)`, say",
        )
    return {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}


def _bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor on the host; good as long as the tensor is there.

    `Tensor.numpy` would do it, too, but counts as a read by the loop where reads are watched.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
