"""What differs between two checkpoints: values and tensors by their paths, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MISSING = "not there"


@dataclass(frozen=True)
class Difference:
    """One value that isn't the same.

    Args:
        path: `model/0.weight`.
        first, second: what stands there, in a few words.
        largest: the largest absolute difference of two tensors of one shape; else None.
    """

    path: str
    first: str
    second: str
    largest: float | None = None


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, times: bool = False
) -> Iterator[Difference]:
    """Gives what isn't the same in the parts of two checkpoints.

    Args:
        times: whether the seconds that training took count, too, which no two runs share.
    """
    one, other = (dict(_flat(parts)) for parts in (first, second))
    for path in {**one, **other}:
        if times or not _is_time(path):
            found = _difference(path, one.get(path, _MISSING), other.get(path, _MISSING))
            if found is not None:
                yield found


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Gives the leaves of a nest, and its empty branches."""
    branches: Any = None
    if isinstance(value, Mapping):
        branches = value.items()
    elif isinstance(value, list | tuple):
        branches = enumerate(value)
    if not branches or not len(value):
        yield path, value
        return
    for key, one in branches:
        yield from _flat(one, f"{path}/{key}".removeprefix("/"))


def _is_time(path: str) -> bool:
    in_clock = path.startswith("training/clock/") and path.endswith("/4")
    return in_clock or path.endswith("/seconds")


def _difference(path: str, one: Any, other: Any) -> Difference | None:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return Difference(path, _described(one), _described(other))
        if _same_bits(one, other):
            return None
        gap = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        return Difference(path, _described(one), _described(other), gap)
    if type(one) is type(other) and (one == other or (one != one and other != other)):
        return None
    return Difference(path, _described(one), _described(other))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*raw)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value) if value != _MISSING else _MISSING
    return text if len(text) <= 60 else f"{text[:57]}..."
