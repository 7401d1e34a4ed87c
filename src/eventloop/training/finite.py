"""Whether the weights in a checkpoint or an export are finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 2**20


def trained_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that are trained; buffers and frozen ones may hold inf."""
    return frozenset(name for name, one in model.named_parameters() if one.requires_grad)


def are_finite(weights: Mapping[str, Any], names: Collection[str]) -> bool | None:
    """Whether the trained parameters among some weights are finite.

    Args:
        weights: as `capture_model` returns them.
        names: of the trained parameters.

    Returns:
        None where no entry is a trained parameter, so that it isn't known.
    """
    if not any(_is_looked_at(name, one, names) for name, one in weights.items()):
        return None
    return first_not_finite(weights, names) is None


def first_not_finite(weights: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Returns the name of the first trained parameter with a NaN or an infinity; None without one.

    Waits for the device that they are on.
    """
    looked_at = ((name, one) for name, one in weights.items() if _is_looked_at(name, one, names))
    return next((name for name, one in looked_at if not is_finite(one)), None)


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries of a floating tensor are finite; waits for its device."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # float8 has no arithmetic
    # A sum is the fastest look there is, and finite only where all entries are.
    if tensor.sum().isfinite():
        return True
    return all(bool(one.isfinite().all()) for one in torch.split(tensor.flatten(), _CHUNK))


def _is_looked_at(name: str, value: Any, names: Collection[str]) -> bool:
    if name not in names or not isinstance(value, Tensor):
        return False
    return value.is_floating_point() or value.is_complex()
