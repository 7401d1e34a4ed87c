"""What differs between two checkpoints: values and tensors by their paths, bit by bit."""

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
_CHUNK = 2**22  # entries that are compared at once, as float64
_OF_ONE_RUN = re.compile(r"(?:(?:rank\d+/)?plugins/[^/]+/)?state/of_this_run(?=/|\Z)")


@dataclass(frozen=True)
class ValueDifference:
    """One value that differs.

    Args:
        path: `model/0.weight`.
        first, second: a short description of each value.
        largest: the largest absolute difference of two tensors of the same shape and dtype; NaN if
            only one is NaN; 0 for zeros of different signs. Otherwise None.
        of_one_run: "seconds" or "plugins/NAME/state/of_this_run" if the value is a part of it, as
            these differ between any two runs; otherwise "".
    """

    path: str
    first: str
    second: str
    largest: float | None = None
    of_one_run: str = ""


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], *, times: bool = False
) -> Iterator[ValueDifference]:
    """Yields the differences between the parts of two checkpoints.

    A missing value counts as one difference, whatever it contains.

    Args:
        first, second: nests by name.
        times: whether to include what always differs between runs: the seconds of training, and
            what plugins save as `of_this_run`.
    """
    for path, one, other in _pairs("", first, second):
        of_one_run = _of_one_run(path, one, other)
        if times or not of_one_run:
            found = _difference(path, one, other)
            if found is not None:
                yield replace(found, of_one_run=of_one_run)


def _pairs(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields pairs of leaves at the same path of two nests, and what only one of them has."""
    both = (one, other)
    branches: Iterator[tuple[object, Any, Any]]
    if all(isinstance(nest, Mapping) for nest in both):
        keys = {**one, **other}
        branches = ((key, one.get(key, _MISSING), other.get(key, _MISSING)) for key in keys)
    elif all(type(nest) is list for nest in both) or all(type(nest) is tuple for nest in both):
        items = zip_longest(one, other, fillvalue=_MISSING)
        branches = ((idx, *pair) for idx, pair in enumerate(items))
    else:
        yield path, one, other
        return
    for key, *pair in branches:
        yield from _pairs(f"{path}/{key}" if path else str(key), *pair)


def _of_one_run(path: str, one: Any, other: Any) -> str:
    in_clock = path.startswith("training/clock/") and path.endswith("/4")
    are_numbers = all(type(value) in (int, float) for value in (one, other))
    if are_numbers and (in_clock or path.endswith("/seconds")):
        return "seconds"
    found = _OF_ONE_RUN.match(path)
    return found[0] if found else ""


def _difference(path: str, one: Any, other: Any) -> ValueDifference | None:
    # What lies in files is read here, two tensors at a time.
    one, other = (each.read() if isinstance(each, SavedTensor) else each for each in (one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return ValueDifference(path, _described(one), _described(other))
        raw = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        if torch.equal(*raw):
            return None
        return ValueDifference(path, _described(one), _described(other), _largest(one, other))
    if type(one) is type(other):
        is_float = isinstance(one, float)  # of which the sign of a zero counts
        if one.hex() == float(other).hex() if is_float else bool(one == other):
            return None
    return ValueDifference(path, _described(one), _described(other))


def _largest(one: Tensor, other: Tensor) -> float:
    parts = (torch.split(tensor.reshape(-1), _CHUNK) for tensor in (one, other))
    gaps = [_gap(*pair) for pair in zip(*parts, strict=True)]
    if any(map(math.isnan, gaps)):
        return math.nan
    # Large ints that aren't the same may be so as float64.
    least = 0.0 if one.is_floating_point() or one.is_complex() else 1.0
    return max(least, *gaps)


def _gap(one: Tensor, other: Tensor) -> float:
    a, b = (
        (torch.view_as_real(part) if part.is_complex() else part).double() for part in (one, other)
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
