"""Rebuilds values from nests, without importing, looking up or calling anything named in a file.

Creates only built-in containers, numbers, arrays, tensors and random generators. Any other object must
exist already, and gets its saved contents.
"""

from __future__ import annotations

import array
import importlib
import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum, Flag
from typing import Any

import torch
from torch import Tensor

from eventloop.errors import a
from eventloop.object_state.entering import CONTAINER_TYPES, is_array, is_c_number, is_seed_source
from eventloop.object_state.generators import fill_generator, fill_seed_source, new_generator
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.parts import refill
from eventloop.object_state.tensor_memory import fill_tensor, new_tensor, new_view
from eventloop.object_state.torch_values import decode_torch_value
from eventloop.object_state.values import DTYPE_KINDS, FACTORIES, Encoded, plain_array
from eventloop.rng import is_generator, tensors_to_arrays

_MUTABLE_TYPES = {kind.__name__: kind for kind in CONTAINER_TYPES if kind not in (tuple, frozenset)}


class Decoder:
    """Rebuilds values from nests, in the order in which they were encoded.

    Args:
        objects: the objects that the task has built, by path.
        device: the device for tensors that weren't on the host.
        classes: the enums and named tuples that the objects use, by name.
    """

    def __init__(
        self,
        objects: Mapping[str, Any],
        device: torch.device,
        classes: Mapping[str, type] | None = None,
    ) -> None:
        self._objects = objects
        self._classes = classes or {}
        self._device = device
        self._numbered: dict[int, Any] = {}

    def decode(self, nest: Encoded, predecessor: Any = None) -> Any:
        """Returns the value of a nest.

        Args:
            predecessor: the current value of the location. If a nest doesn't name a class, such as a
                named tuple's, the predecessor's class is used.

        Raises:
            NotSavableError, LookupError, TypeError, ValueError, RuntimeError, AttributeError: the nest
                is invalid, or doesn't fit the predecessor.
        """
        if not isinstance(nest, Mapping):
            return nest
        kind = nest["kind"]
        if kind == "object":
            return self._objects[nest["path"]]
        if kind == "identity":
            return id(self._objects[nest["path"]])
        if kind == "same":
            return self._numbered[nest["number"]]
        if kind in _MUTABLE_TYPES:
            # Registered while it is still empty, since an entry may refer to its container.
            value = self._empty(nest, predecessor)
            self._numbered[nest["number"]] = value
            self._refill(value, nest, predecessor)
            return value
        value = self._value(kind, nest, predecessor)
        if "number" in nest:
            self._numbered[nest["number"]] = value
        return value

    def decode_contents(self, nest: Encoded, target: Any) -> None:
        """Replaces the contents of an object by saved contents; raises like `decode`."""
        kind = nest["kind"]
        if kind in ("bits", "seeds") and is_seed_source(target):
            fill_seed_source(target, nest)
        elif kind in _MUTABLE_TYPES:
            if type(target) is not _MUTABLE_TYPES[kind]:
                raise NotSavableError(f"it is {a(type(target).__name__)} here, and was a {kind}")
            self._refill(target, nest, target)
        elif kind == "tensor" and isinstance(target, Tensor):
            fill_tensor(target, nest)
        elif kind == "generator" and is_generator(target):
            fill_generator(target, nest)
        elif kind == "numpy array":
            values = _decode_numpy(nest)
            entries = plain_array(target) if is_array(target) else target
            if entries.shape != values.shape:
                target.resize(values.shape, refcheck=False)
                entries = plain_array(target)
            entries[...] = values
        elif kind == "ctypes" and is_c_number(target):
            memoryview(target).cast("B")[:] = nest["bytes"]
        elif kind in ("bytearray", "array"):
            target[:] = self._value(kind, nest, target)
        else:
            raise NotSavableError(f"it is {a(type(target).__name__)} here, and was a {kind!r}")

    def _value(self, kind: str, nest: Encoded, predecessor: Any) -> Any:
        match kind:
            case "tuple":
                return tuple(self._items(nest["items"], _sequence(predecessor)))
            case "frozenset":
                return frozenset(self._items(nest["items"]))
            case "namedtuple":
                return self._namedtuple(nest, predecessor)
            case "complex":
                return complex(*map(float, nest["parts"]))
            case "range":
                return range(*map(operator.index, nest["parts"]))
            case "bytearray":
                return bytearray(nest["bytes"])
            case "array":
                return _decode_array(nest)
            case "numpy array":
                return _decode_numpy(nest)
            case "numpy scalar":
                return _decode_numpy(nest)[()]
            case "enum":
                return self._enum(nest, predecessor)
            case "generator":
                return new_generator(nest, self._device)
            case "tensor":
                return new_tensor(nest, self._device)
            case "count":
                return itertools.count(nest["start"], nest["step"])
            case "repeat":
                times = () if nest["times"] is None else (operator.index(nest["times"]),)
                return itertools.repeat(self.decode(nest["item"]), *times)
            case "view":
                return new_view(nest, self.decode(nest["of"]))
            case "size" | "device" | "torch constant":
                return decode_torch_value(nest, self._device)
            case "cycle":
                return self._cycle(nest)
            case "iterator":
                return self._iterator(nest)
        raise NotSavableError(f"{kind!r} isn't a kind of value")

    def _empty(self, nest: Encoded, predecessor: Any) -> Any:
        kind = _MUTABLE_TYPES[nest["kind"]]
        if kind is defaultdict:
            if nest.get("factory") is not None:
                return defaultdict(FACTORIES[nest["factory"]])
            if type(predecessor) is not defaultdict:
                raise NotSavableError("the factory of a defaultdict isn't saved")
            return defaultdict(predecessor.default_factory)
        return deque(maxlen=nest["maxlen"]) if kind is deque else kind()

    def _refill(self, container: Any, nest: Encoded, predecessor: Any) -> None:
        kind = _MUTABLE_TYPES[nest["kind"]]
        if issubclass(kind, dict):
            keys = self._items(nest["keys"])
            values = dict(predecessor) if isinstance(predecessor, dict) else {}
            items = self._items(nest["items"], [values.get(key) for key in keys])
            refill(container, kind, dict(zip(keys, items, strict=True)))
        else:
            refill(container, kind, self._items(nest["items"], _sequence(predecessor)))

    def _items(self, nest: Encoded, predecessors: Sequence[Any] = ()) -> list[Any]:
        if isinstance(nest, Tensor):
            return nest.tolist()
        pairs = zip(nest, itertools.chain(predecessors, itertools.repeat(None)), strict=False)
        return [self.decode(item, predecessor) for item, predecessor in pairs]

    def _namedtuple(self, nest: Encoded, predecessor: Any) -> Any:
        kind: Any = self._classes.get(nest.get("class"), type(predecessor))
        if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
            raise NotSavableError("the class of a named tuple isn't saved")
        items = self._items(nest["items"], _sequence(predecessor))
        if len(items) != len(kind._fields):
            raise NotSavableError(f"a {kind.__name__} has {len(kind._fields)} fields")
        return tuple.__new__(kind, items)

    def _enum(self, nest: Encoded, predecessor: Any) -> Enum:
        kind: Any = self._classes.get(nest.get("class"), type(predecessor))
        if not issubclass(kind, Enum):
            raise NotSavableError("the class of an enum isn't saved")
        if nest.get("flags") is None:
            member: Enum = kind._member_map_[nest["name"]]
            return member
        flags = operator.index(nest["flags"])
        existing: Enum | None = kind._value2member_map_.get(flags)
        if existing is not None:
            return existing
        # The base class's method, since a user's class may override it and no user code may run here.
        create_combination: Any = Flag._missing_
        combination: Enum = create_combination.__func__(kind, flags)
        return combination

    def _cycle(self, nest: Encoded) -> itertools.cycle[Any]:
        items = self._items(nest["items"])
        cycle = itertools.cycle(items)
        for _ in range(operator.index(nest["position"]) % max(len(items), 1)):
            next(cycle)
        return cycle

    def _iterator(self, nest: Encoded) -> Any:
        sequence = self.decode(nest["over"])
        if type(sequence) not in (list, tuple, range, str, bytes):
            raise NotSavableError(f"an iterator over a {type(sequence).__name__} isn't saved")
        iterator: Any = iter(sequence)
        iterator.__setstate__(operator.index(nest["position"]))
        return iterator


def _sequence(predecessor: Any) -> Sequence[Any]:
    """Returns the entries of a location's current value; () if it isn't a sequence."""
    return list(predecessor) if isinstance(predecessor, (list, tuple, deque)) else ()


def _decode_array(nest: Encoded) -> array.array[Any]:
    if nest["typecode"] not in tuple("bBhHiIlLqQfd"):
        raise NotSavableError(f"{nest['typecode']!r} isn't a type of an array's numbers")
    return array.array(nest["typecode"], nest["bytes"])


def _decode_numpy(nest: Encoded) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = numpy.dtype(nest["values"]["array"])
    if dtype.kind not in DTYPE_KINDS or dtype.fields or dtype.subdtype:
        raise NotSavableError(f"arrays of {dtype} aren't saved")
    return tensors_to_arrays(nest["values"])
