"""Splits nests (dicts, lists and tuples of values) into named tensors and JSON, and rebuilds them.

JSON stores None, bool, str, finite floats, 64-bit ints, lists and dicts with str keys directly.
Other values become an object with one key: `{"$tensor": NAME}`, `{"$tuple": [...]}`,
`{"$size": [...]}`, `{"$dict": [[KEY, VALUE], ...]}` if a key is an int or starts with a dollar,
`{"$float": "nan"}`, `{"$int": "0x..."}` and `{"$bytes": BASE64}`.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from eventloop.errors import CheckpointError, a
from eventloop.files.disk import CorruptFileError
from eventloop.naming import full_name
from eventloop.training.tensor_slices import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

# None, bool, int, float, str, bytes, a tensor or a slice, and dicts, lists and tuples of nests.
Nest: TypeAlias = Any
Json: TypeAlias = Any
Tensors: TypeAlias = "dict[str, Tensor | TensorSlice]"
T = TypeVar("T")

MAX_DEPTH = 64
_HAS = "None, bool, int, float, str, bytes, tensors, torch.Size, and dicts (str or int keys), lists and tuples"
_LEAVE_OUT = "leave it out, or move it to a device with memory first"
_AS_IS = (type(None), bool, str)  # types that JSON stores directly
_NESTED = (dict, list)  # JSON types that may contain encoded values
_LARGE = 2**63  # ints from here on are stored in hexadecimal
_NAME_ALONE = "value"  # the name of a tensor that is the whole nest


def flatten(nest: Nest, name: str) -> tuple[Tensors, Json]:
    """Splits a nest into its tensors by name, not copied, and a JSON skeleton of the other values.

    A tensor's name joins the keys of its path, `layer.0.weight`; in a flat dict it is the key.
    Dict subclasses become dicts, NumPy scalars Python scalars, and parameters tensors.

    Args:
        nest: to split.
        name: the name of the nest in messages.

    Raises:
        CheckpointError: the nest contains a value of another type, or is deeper than 64 levels; the
            message has the path and the type.
    """
    tensors: Tensors = {}
    return tensors, _encode(nest, _Position(name, (), tensors))


def restore(skeleton: Json, tensors: Mapping[str, T]) -> Nest:
    """Inverse of `flatten`.

    Args:
        skeleton: from a file; not trusted.
        tensors: tensors by name, or the values to use instead of tensors.

    Raises:
        CorruptFileError: the skeleton is invalid, or doesn't fit the tensors.
    """
    unused_tensors = dict(tensors)
    nest = _decode(skeleton, unused_tensors, 0)
    if unused_tensors:
        raise CorruptFileError(f"it has no place for the tensor {next(iter(unused_tensors))!r}")
    return nest


def is_plain(skeleton: Json, tensors: Mapping[str, object]) -> bool:
    """Returns whether a nest is a flat dict of tensors, which needs no skeleton."""
    return bool(tensors) and skeleton == {name: {"$tensor": name} for name in tensors}


def map_leaves(nest: Nest, change: Callable[[Any], Any]) -> Nest:
    """Returns a nest with `change` applied to each value in its dicts, lists and tuples."""
    if isinstance(nest, Mapping):
        return {key: map_leaves(entry, change) for key, entry in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(map_leaves(entry, change) for entry in nest)
    return change(nest)


@dataclass(frozen=True, slots=True)
class _Position:
    """A path in a nest, and the tensors found so far."""

    root: str
    keys: tuple[tuple[str | int, bool], ...]  # (key, whether it is a position in a list)
    tensors: Tensors

    def below(self, key: str | int, *, is_idx: bool = False) -> _Position:
        if len(self.keys) == MAX_DEPTH:
            raise CheckpointError(
                f"{self.path()[:200]!r} can't be saved: it is more than {MAX_DEPTH} levels deep",
                fix="save a flatter value; a value must not contain itself",
            )
        return _Position(self.root, (*self.keys, (key, is_idx)), self.tensors)

    def path(self) -> str:
        text = self.root
        for key, is_idx in self.keys:
            is_word = isinstance(key, str) and re.fullmatch(r"[\w./-]+", key)
            text += f".{key}" if is_word and not is_idx else f"[{key!r}]"
        return text

    def take(self, tensor: Tensor | TensorSlice) -> Json:
        name = ".".join(str(key) for key, _ in self.keys) or _NAME_ALONE
        name = name.encode("utf-8", "backslashreplace").decode()
        if name == "__metadata__" or name in self.tensors:
            other_names = (f"{name}#{number}" for number in range(2, len(self.tensors) + 3))
            name = next(other_name for other_name in other_names if other_name not in self.tensors)
        self.tensors[name] = tensor
        return {"$tensor": name}

    def refuse(self, value: object, reason: str = "", fix: str = "") -> CheckpointError:
        kind = type(value)
        type_name = kind.__qualname__ if kind.__module__ == "builtins" else full_name(kind)
        return CheckpointError(
            f"{self.path()!r} can't be saved: it is {reason or a(type_name)}",
            fix=fix or f"save values of these kinds: {_HAS} of them",
        )


def _encode(value: Nest, position: _Position) -> Json:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # In hexadecimal, because Python refuses to read more than 4300 decimal digits.
        return value if -_LARGE <= value < _LARGE else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return _encode_dict(value, position)
    if kind is list or kind is tuple:
        items = [
            entry if type(entry) in _AS_IS else _encode(entry, position.below(idx, is_idx=True))
            for idx, entry in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is TensorSlice:
        _require_dense(value.tensor, position)
        return position.take(value)
    # A value can only be a tensor if torch was imported. Importing it here would take a second.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        _require_dense(value, position)
        return position.take(value.detach())
    if torch is not None and kind is torch.Size:
        return {"$size": list(value)}
    # The same holds for NumPy's scalars.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufSU":
        plain_value = value.item()
        if type(plain_value) in (bool, int, float, str, bytes):
            return _encode(plain_value, position)
    raise position.refuse(value)


def _require_dense(tensor: Tensor, position: _Position) -> None:
    import torch  # not imported by code that only rebuilds nests

    if tensor.is_nested:
        raise position.refuse(tensor, "a nested tensor", "save `list(tensor.unbind())`")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise position.refuse(tensor)  # a subclass such as DTensor
    if tensor.is_meta:
        raise position.refuse(tensor, "a tensor without values, on the device 'meta'", _LEAVE_OUT)
    if not is_dense(tensor):
        description = f"a tensor of {tensor.layout}, {tensor.dtype}, not a dense one"
        conversion = "`tensor.dequantize()`" if tensor.is_quantized else "`tensor.to_dense()`"
        raise position.refuse(tensor, description, f"save {conversion}, or its component tensors")


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor is strided and plain: not nested, quantized or on "meta"."""
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return not is_odd and str(tensor.layout) == "torch.strided"


def _encode_dict(value: Mapping[Any, Nest], position: _Position) -> Json:
    items = {}
    is_plain_json = True
    for key, entry in value.items():
        if type(key) is not str:
            if type(key) is not int:
                kind = a(full_name(type(key)))
                raise position.refuse(value, f"a dict with the key {str(key)[:80]!r}, {kind}")
            is_plain_json = False
        elif key[:1] == "$":
            is_plain_json = False
        as_is = type(entry) in _AS_IS or (type(entry) is int and -_LARGE <= entry < _LARGE)
        items[key] = entry if as_is else _encode(entry, position.below(key))
    if is_plain_json:
        return items
    return {"$dict": [[_encode(key, position), entry] for key, entry in items.items()]}


def _decode(value: Json, unused_tensors: dict[str, Any], depth: int) -> Nest:
    if depth > MAX_DEPTH:
        raise CorruptFileError(f"it is more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [
            _decode(entry, unused_tensors, depth + 1) if type(entry) in _NESTED else entry
            for entry in value
        ]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("$"):
        return _decode_tagged(tag, value[tag], unused_tensors, depth)
    nest = {}
    for key, entry in value.items():
        if key[:1] == "$":
            raise CorruptFileError(f"unknown key {key[:80]!r}")
        nest[key] = _decode(entry, unused_tensors, depth + 1) if type(entry) in _NESTED else entry
    return nest


def _decode_tagged(tag: str, content: Json, unused_tensors: dict[str, Any], depth: int) -> Nest:
    match tag, content:
        case "$tensor", str(name):
            if name not in unused_tensors:
                raise CorruptFileError(f"the tensor {name[:80]!r} is missing, or used twice")
            return unused_tensors.pop(name)
        case "$tuple", list(items):
            return tuple(_decode(size, unused_tensors, depth + 1) for size in items)
        case "$size", list(sizes) if all(type(size) is int for size in sizes):
            import torch  # most files contain no torch.Size

            return torch.Size(sizes)
        case "$dict", list(pairs):
            return _decode_pairs(pairs, unused_tensors, depth)
        case "$float", "nan" | "inf" | "-inf":
            return float(content)
        case "$int", str(digits) if re.fullmatch(r"-?0x[0-9a-f]+", digits):
            return int(digits, 16)
        case "$bytes", str(text):
            try:
                return base64.b64decode(text, validate=True)
            except ValueError:
                raise CorruptFileError("bytes in it aren't base64") from None
    raise CorruptFileError(f"invalid value of {tag[:80]!r}")


def _decode_pairs(
    pairs: list[Json], unused_tensors: dict[str, Any], depth: int
) -> dict[str | int, Nest]:
    result: dict[str | int, Nest] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptFileError("a dict in it isn't made of pairs")
        key = _decode(pair[0], {}, depth + 1)  # a large int is encoded
        if type(key) not in (str, int):
            raise CorruptFileError("a dict in it has a key that is neither a str nor an int")
        result[key] = _decode(pair[1], unused_tensors, depth + 1)
    return result
