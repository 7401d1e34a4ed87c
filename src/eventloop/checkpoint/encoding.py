"""Splits nests (dicts, lists and tuples of values) into named tensors and JSON, and rebuilds them.

JSON holds None, bool, str, finite floats, 64-bit ints, lists and dicts with str keys as they are.
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

# None, bool, int, float, str, bytes, a tensor or a slice of one, and dicts, lists and tuples of nests.
Nest: TypeAlias = Any
Json: TypeAlias = Any
Tensors: TypeAlias = "dict[str, Tensor | TensorSlice]"
T = TypeVar("T")

MAX_DEPTH = 64
_HAS = "None, bool, int, float, str, bytes, tensors, torch.Size, and dicts (str or int keys), lists and tuples"
_LEAVE_OUT = "leave it out, or give it memory on a device first"
_AS_IS = (type(None), bool, str)  # what JSON holds as it is
_NESTED = (dict, list)  # what may have to be decoded in JSON
_LARGE = 2**63  # an int that is written in another way
_NAME_ALONE = "value"  # of a tensor that is the whole nest


def flatten(nest: Nest, name: str) -> tuple[Tensors, Json]:
    """Splits a nest into its tensors by name, not copied, and a JSON skeleton of the rest.

    A tensor's name joins the keys of its path, `layer.0.weight`; in a flat dict it is the key.
    Dict subclasses become dicts, NumPy scalars Python scalars, parameters tensors.

    Args:
        name: what the nest is called in messages.

    Raises:
        CheckpointError: it holds a value of another type, or is nested deeper than 64 levels; the
            message has the path and the type.
    """
    tensors: Tensors = {}
    return tensors, _encode(nest, _At(name, (), tensors))


def restore(skeleton: Json, tensors: Mapping[str, T]) -> Nest:
    """Rebuilds what `flatten` split; raises CorruptFileError if the skeleton doesn't fit.

    Args:
        skeleton: from a file; not trusted.
        tensors: by name, or the values to use instead of them.
    """
    left = dict(tensors)
    nest = _decode(skeleton, left, 0)
    if left:
        raise CorruptFileError(f"it doesn't say where the tensor {next(iter(left))!r} belongs")
    return nest


def is_plain(skeleton: Json, tensors: Mapping[str, object]) -> bool:
    """Returns whether a nest is a dict of tensors by name and nothing else."""
    return bool(tensors) and skeleton == {name: {"$tensor": name} for name in tensors}


def map_leaves(nest: Nest, change: Callable[[Any], Any]) -> Nest:
    """Returns a nest with each value in its dicts, lists and tuples changed."""
    if isinstance(nest, Mapping):
        return {key: map_leaves(one, change) for key, one in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(map_leaves(one, change) for one in nest)
    return change(nest)


# Taking apart


@dataclass(frozen=True, slots=True)
class _At:
    """A path in a nest, and the tensors found so far."""

    root: str
    keys: tuple[tuple[str | int, bool], ...]  # with whether it counts entries
    tensors: Tensors

    def below(self, key: str | int, *, is_idx: bool = False) -> _At:
        if len(self.keys) == MAX_DEPTH:
            raise CheckpointError(
                f"{self.path()[:200]!r} can't be saved: it is more than {MAX_DEPTH} levels deep",
                fix="save something flatter, and nothing that contains itself",
            )
        return _At(self.root, (*self.keys, (key, is_idx)), self.tensors)

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
            others = (f"{name}#{number}" for number in range(2, len(self.tensors) + 3))
            name = next(one for one in others if one not in self.tensors)
        self.tensors[name] = tensor
        return {"$tensor": name}

    def refuse(self, value: object, reason: str = "", fix: str = "") -> CheckpointError:
        kind = type(value)
        of = kind.__qualname__ if kind.__module__ == "builtins" else full_name(kind)
        return CheckpointError(
            f"{self.path()!r} can't be saved: it is {reason or a(of)}",
            fix=fix or f"save values of these kinds: {_HAS} of them",
        )


def _encode(value: Nest, at: _At) -> Json:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        # Python refuses to read more than 4300 decimal digits.
        return value if -_LARGE <= value < _LARGE else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return _encode_dict(value, at)
    if kind is list or kind is tuple:
        items = [
            one if type(one) in _AS_IS else _encode(one, at.below(idx, is_idx=True))
            for idx, one in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is TensorSlice:
        _require_dense(value.tensor, at)
        return at.take(value)
    # Until torch is imported, nothing can be a tensor.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        _require_dense(value, at)
        return at.take(value.detach())
    if torch is not None and kind is torch.Size:
        return {"$size": list(value)}
    # Likewise, a scalar of NumPy.
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufSU":
        held = value.item()
        if type(held) in (bool, int, float, str, bytes):
            return _encode(held, at)
    raise at.refuse(value)


def _require_dense(tensor: Tensor, at: _At) -> None:
    import torch  # kept out of what only puts together

    if tensor.is_nested:
        raise at.refuse(tensor, "a nested tensor", "save `list(tensor.unbind())`")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise at.refuse(tensor)  # a part of a tensor that is spread over ranks, say
    if tensor.is_meta:
        raise at.refuse(tensor, "a tensor without values, on the device 'meta'", _LEAVE_OUT)
    if not is_dense(tensor):
        what = f"a tensor of {tensor.layout}, {tensor.dtype}, not a dense one"
        ways = "`tensor.dequantize()`" if tensor.is_quantized else "`tensor.to_dense()`"
        raise at.refuse(tensor, what, f"save {ways}, or what it is made of")


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor's entries are values, in rows of the same length."""
    is_odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return not is_odd and str(tensor.layout) == "torch.strided"


def _encode_dict(value: Mapping[Any, Nest], at: _At) -> Json:
    items = {}
    is_plain_json = True
    for key, one in value.items():
        if type(key) is not str:
            if type(key) is not int:
                kind = a(full_name(type(key)))
                raise at.refuse(value, f"a dict with the key {str(key)[:80]!r}, {kind}")
            is_plain_json = False
        elif key[:1] == "$":
            is_plain_json = False
        as_is = type(one) in _AS_IS or (type(one) is int and -_LARGE <= one < _LARGE)
        items[key] = one if as_is else _encode(one, at.below(key))
    if is_plain_json:
        return items
    return {"$dict": [[_encode(key, at), one] for key, one in items.items()]}


# Putting together


def _decode(value: Json, left: dict[str, Any], depth: int) -> Nest:
    if depth > MAX_DEPTH:
        raise CorruptFileError(f"it is more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_decode(one, left, depth + 1) if type(one) in _NESTED else one for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if len(value) == 1 and tag.startswith("$"):
        return _decode_tagged(tag, value[tag], left, depth)
    nest = {}
    for key, one in value.items():
        if key[:1] == "$":
            raise CorruptFileError(f"the key {key[:80]!r} means nothing")
        nest[key] = _decode(one, left, depth + 1) if type(one) in _NESTED else one
    return nest


def _decode_tagged(tag: str, inside: Json, left: dict[str, Any], depth: int) -> Nest:
    match tag, inside:
        case "$tensor", str(name):
            if name not in left:
                raise CorruptFileError(
                    f"there is no tensor {name[:80]!r} for it, or it is used twice"
                )
            return left.pop(name)
        case "$tuple", list(items):
            return tuple(_decode(one, left, depth + 1) for one in items)
        case "$size", list(sizes) if all(type(one) is int for one in sizes):
            import torch  # most of what is read has none

            return torch.Size(sizes)
        case "$dict", list(pairs):
            return _decode_pairs(pairs, left, depth)
        case "$float", "nan" | "inf" | "-inf":
            return float(inside)
        case "$int", str(digits) if re.fullmatch(r"-?0x[0-9a-f]+", digits):
            return int(digits, 16)
        case "$bytes", str(text):
            try:
                return base64.b64decode(text, validate=True)
            except ValueError:
                raise CorruptFileError("bytes in it aren't base64") from None
    raise CorruptFileError(f"{tag[:80]!r} with what follows it means nothing")


def _decode_pairs(pairs: list[Json], left: dict[str, Any], depth: int) -> dict[str | int, Nest]:
    result: dict[str | int, Nest] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CorruptFileError("a dict in it isn't made of pairs")
        key = _decode(pair[0], {}, depth + 1)  # an int may be a large one
        if type(key) not in (str, int):
            raise CorruptFileError("a dict in it has a key that is neither a str nor an int")
        result[key] = _decode(pair[1], left, depth + 1)
    return result
