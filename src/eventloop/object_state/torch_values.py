"""Facts about tensors that are values: shapes, devices, dtypes, layouts, memory formats."""

from __future__ import annotations

import operator
from typing import Any

import torch

from eventloop.devices import kind_of
from eventloop.object_state.not_savable import NotSavableError

# Equal if they are written alike: torch makes a new object each time one is read.
TORCH_VALUES = frozenset({torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format})
_CONSTANTS = {str(value): value for value in vars(torch).values() if type(value) in TORCH_VALUES}


def encode_torch_value(value: Any) -> dict[str, Any]:
    """Returns a value of one of `TORCH_VALUES` as a nest."""
    if isinstance(value, torch.Size):
        return {"kind": "size", "items": list(value)}
    if isinstance(value, torch.device):
        return {"kind": "device", "is_host": kind_of(value).is_host}
    return {"kind": "torch constant", "name": str(value)}


def decode_torch_value(nest: Any, device: torch.device) -> Any:
    """Returns the value of a nest.

    Args:
        device: of the run; the saved one may have been another.

    Raises:
        NotSavableError: torch has no such value.
    """
    if nest["kind"] == "size":
        return torch.Size(map(operator.index, nest["items"]))
    if nest["kind"] == "device":
        return torch.device("cpu") if nest["is_host"] else device
    name = nest["name"]
    if name not in _CONSTANTS:
        raise NotSavableError(f"torch has no constant {name!r}")
    return _CONSTANTS[name]
