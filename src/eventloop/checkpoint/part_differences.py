"""Compares the values and tensors of two checkpoints bitwise, by path."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from eventloop.checkpoint.saved_tensors import SavedTensor

_MISSING = object()
_MOST_CHARACTERS = 60
_CHUNK = 2**22  # entries that are compared at a time, as float64
_OF_ONE_RUN = re.compile(r"(?:(?:rank\d+/)?plugins/[^/]+/)?state/of_this_run(?=/|\Z)")


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs between two checkpoints.

    Args:
        path: `model/0.weight`.
        first, second: a short description of each value.
        largest: the largest absolute difference of two tensors of the same shape and dtype; NaN if
            an entry is NaN in only one tensor; 0 for zeros of different signs. None for other values.
        of_one_run: "seconds" or "plugins/NAME/state/of_this_run" if the value belongs to it, because
            these differ between any two runs; otherwise "".
    """

    path: str
    first: str
    second: str
    largest: float | None = None
    of_one_run: str = ""


def differences(
    first_parts: Mapping[str, Any], second_parts: Mapping[str, Any], *, times: bool = False
) -> Iterator[ValueDifference]:
    """Yields the differences between the parts of two checkpoints.

    A missing value counts as a single difference, regardless of its content.

    Args:
        first_parts, second_parts: nests by name.
        times: whether to include values that always differ between runs: the seconds of training,
            and values that plugins save as `of_this_run`.
    """
    for path, value, other_value in _pairs("", first_parts, second_parts):
        of_one_run = _of_one_run(path, value, other_value)
        if times or not of_one_run:
            difference = _difference(path, value, other_value)
            if difference is not None:
                yield replace(difference, of_one_run=of_one_run)


def _pairs(path: str, value: Any, other_value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, value, other value) for each leaf of two nests; a missing value is `_MISSING`."""
    nests = (value, other_value)
    branches: Iterator[tuple[object, Any, Any]]
    if all(isinstance(nest, Mapping) for nest in nests):
        keys = {**value, **other_value}
        branches = ((key, value.get(key, _MISSING), other_value.get(key, _MISSING)) for key in keys)
    elif all(type(nest) is list for nest in nests) or all(type(nest) is tuple for nest in nests):
        items = zip_longest(value, other_value, fillvalue=_MISSING)
        branches = ((idx, *pair) for idx, pair in enumerate(items))
    else:
        yield path, value, other_value
        return
    for key, *pair in branches:
        yield from _pairs(f"{path}/{key}" if path else str(key), *pair)


def _of_one_run(path: str, value: Any, other_value: Any) -> str:
    in_clock = path.startswith("training/clock/") and path.endswith("/4")
    are_numbers = type(value) in (int, float) and type(other_value) in (int, float)
    if are_numbers and (in_clock or path.endswith("/seconds")):
        return "seconds"
    match = _OF_ONE_RUN.match(path)
    return match[0] if match else ""


def _difference(path: str, value: Any, other_value: Any) -> ValueDifference | None:
    # Saved tensors are read here, so that only two are in memory at a time.
    value, other_value = (
        saved.read() if isinstance(saved, SavedTensor) else saved for saved in (value, other_value)
    )
    if isinstance(value, Tensor) and isinstance(other_value, Tensor):
        if value.shape != other_value.shape or value.dtype != other_value.dtype:
            return ValueDifference(path, _described(value), _described(other_value))
        raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (value, other_value))
        if torch.equal(*raw):
            return None
        return ValueDifference(
            path, _described(value), _described(other_value), _largest(value, other_value)
        )
    if type(value) is type(other_value):
        is_float = isinstance(value, float)  # compared in hexadecimal, which has the sign of a zero
        if value.hex() == float(other_value).hex() if is_float else bool(value == other_value):
            return None
    return ValueDifference(path, _described(value), _described(other_value))


def _largest(tensor: Tensor, other_tensor: Tensor) -> float:
    chunks = torch.split(tensor.reshape(-1), _CHUNK)
    other_chunks = torch.split(other_tensor.reshape(-1), _CHUNK)
    gaps = [_gap(*pair) for pair in zip(chunks, other_chunks, strict=True)]
    if any(map(math.isnan, gaps)):
        return math.nan
    # Different large ints may round to the same float64, so the difference is at least 1.
    least = 0.0 if tensor.is_floating_point() or tensor.is_complex() else 1.0
    return max(least, *gaps)


def _gap(chunk: Tensor, other_chunk: Tensor) -> float:
    a, b = (
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
        for tensor in (chunk, other_chunk)
    )
    is_same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().masked_fill(is_same, 0.0).max())


def _described(value: Any) -> str:
    if value is _MISSING:
        return "not there"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping | list | tuple):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 2**63:  # Python may refuse to write it in decimals
        return _shortened(hex(value))
    if isinstance(value, str | bytes):
        return _shortened(repr(value[: _MOST_CHARACTERS + 1]))
    return repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
