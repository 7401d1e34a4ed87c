"""Encodes shapes, devices, dtypes, layouts and memory formats of torch."""

from __future__ import annotations

import operator
from typing import Any

import torch

from eventloop.devices import kind_of
from eventloop.object_state.not_savable import NotSavableError

# Compared by equality, not by identity: torch creates a new `Size` or `device` at each access.
TORCH_VALUES = frozenset({torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format})
_CONSTANTS = {str(value): value for value in vars(torch).values() if type(value) in TORCH_VALUES}


def encode_torch_value(value: Any) -> dict[str, Any]:
    """Returns the nest of a value whose type is in `TORCH_VALUES`."""
    if isinstance(value, torch.Size):
        return {"kind": "size", "items": list(value)}
    if isinstance(value, torch.device):
        return {"kind": "device", "is_host": kind_of(value).is_host}
    return {"kind": "torch constant", "name": str(value)}


def decode_torch_value(nest: Any, device: torch.device) -> Any:
    """Returns the value of a nest.

    Args:
        device: the device of this run, which replaces a saved accelerator.

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
