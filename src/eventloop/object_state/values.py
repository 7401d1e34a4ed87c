"""Encodes values as nests of plain values and tensors for checkpoints; `decoding` is the inverse.

The nest of a plain value is the value itself. Any other nest is a dict with the key `kind`.
"""

from __future__ import annotations

import array
import itertools
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from enum import Enum, Flag
from typing import Any

import torch
from torch import Tensor

from eventloop.errors import a
from eventloop.naming import full_name
from eventloop.object_state.entering import (
    CONTAINER_TYPES,
    MAX_NESTING,
    PLAIN_TYPES,
    is_array,
    is_c_number,
    is_numpy_scalar,
    is_seed_source,
)
from eventloop.object_state.generators import (
    PLAIN_GENERATORS,
    encode_generator,
    encode_seed_source,
)
from eventloop.object_state.iterators import (
    SEQUENCE_ITERATORS,
    items_of_cycle,
    numbers_of_count,
    position_of,
)
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.tensor_memory import encode_tensor, encode_view
from eventloop.object_state.torch_values import TORCH_VALUES, encode_torch_value
from eventloop.rng import arrays_to_tensors, is_generator

Encoded = Any
DTYPE_KINDS = "biufcmMSU"  # of NumPy: numbers, times and texts
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, bool, str, deque, Counter)
}
_INT64 = 2**63
# Longer lists of numbers are saved as a tensor, which is smaller and faster to save.
_MAX_LIST_LENGTH = 32


class Encoder:
    """Encodes values. If an object occurs again, it is encoded as a reference.

    Args:
        path_of: takes the id of an object; returns its path if a new process builds the object again,
            else None.
        class_names: the names of enums and named tuples that a new process knows; None for any class.
        base_of: returns the tensor whose memory a tensor or an array shares with other objects.
    """

    def __init__(
        self,
        path_of: Callable[[int], str | None],
        class_names: Collection[str] | None = None,
        base_of: Callable[[Any], Tensor | None] = lambda value: None,
    ) -> None:
        self._path_of = path_of
        self._class_names = class_names
        self._base_of = base_of
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # referenced, so that no identity is used again

    def encode(self, value: Any, depth: int = 0) -> Encoded:
        """Returns a value as a nest.

        Raises:
            NotSavableError: the value or an entry has a type that can't be saved.
        """
        if type(value) is complex:
            return {"kind": "complex", "parts": [value.real, value.imag]}
        # An int that is the id of an object, for example a key of a cache by `id(...)`.
        if type(value) is int and (path := self._path_of(value)) is not None:
            return {"kind": "identity", "path": path}
        if type(value) in PLAIN_TYPES:
            return value
        if (path := self._path_of(id(value))) is not None:
            return {"kind": "object", "path": path}
        if (number := self._numbers.get(id(value))) is not None:
            return {"kind": "same", "number": number}
        if type(value) in (tuple, frozenset):
            return self._encode_new(value, depth)
        # Numbered before its contents are encoded, so that a container may contain itself.
        number = len(self._objects)
        self._numbers[id(value)] = number
        self._objects.append(value)
        return {**self._encode_new(value, depth), "number": number}

    def encode_contents(self, value: Any, depth: int = 0) -> Encoded:
        """Returns the contents of an object as a nest; raises NotSavableError."""
        kind = type(value)
        if kind in CONTAINER_TYPES:
            return self._encode_container(value, depth)
        if isinstance(value, Tensor):
            return encode_tensor(value)
        if is_generator(value):
            return encode_generator(value)
        if is_seed_source(value):
            return encode_seed_source(value)
        if isinstance(value, Enum):
            flags = value._value_ if isinstance(value, Flag) else None
            name = self._class_name(kind)
            return {"kind": "enum", "class": name, "name": value._name_, "flags": flags}
        if kind in TORCH_VALUES:
            return encode_torch_value(value)
        if is_array(value) or is_numpy_scalar(value):
            return _encode_numpy(value)
        if kind is array.array:
            return {"kind": "array", "typecode": value.typecode, "bytes": value.tobytes()}
        if kind is bytearray:
            return {"kind": "bytearray", "bytes": bytes(value)}
        if is_c_number(value):
            return {"kind": "ctypes", "bytes": bytes(value)}
        if kind is range:
            return {"kind": "range", "parts": [value.start, value.stop, value.step]}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = self._items(tuple(value), depth)
            return {"kind": "namedtuple", "class": self._class_name(kind), "items": items}
        return self._encode_iterator(value, depth)

    def _encode_new(self, value: Any, depth: int) -> Encoded:
        """Returns the nest of an object that a new process has to create; raises NotSavableError."""
        kind = type(value)
        if isinstance(value, Tensor) or is_array(value):
            base = self._base_of(value)
            if base is not None:
                return encode_view(value, self.encode(base, depth + 1))
        if (
            (is_generator(value) and kind.__name__ not in PLAIN_GENERATORS)
            or is_seed_source(value)
            or is_c_number(value)
            or (is_array(value) and kind is not sys.modules["numpy"].ndarray)
        ):
            raise NotSavableError(
                f"it holds {a(full_name(kind))} that was created during the run; create it in the task, "
                "and let the run change its state"
            )
        nest = self.encode_contents(value, depth)
        if kind is defaultdict:
            nest["factory"] = self._factory_name(value)
        return nest

    def _factory_name(self, container: defaultdict[Any, Any]) -> str | None:
        for name, kind in FACTORIES.items():
            if container.default_factory is kind:
                return name
        if self._class_names is not None:
            raise NotSavableError(
                "it holds a defaultdict with a factory function that was created during the run; "
                "create it in the task"
            )
        return None

    def _class_name(self, kind: type) -> str:
        name = class_name(kind)
        if self._class_names is not None and name not in self._class_names:
            raise NotSavableError(
                f"it holds {a(full_name(kind))}, but a resumed run can't find this class, since no "
                "object that the task builds has an instance of it"
            )
        return name

    def _encode_container(self, container: Any, depth: int) -> Encoded:
        if depth >= MAX_NESTING:
            raise NotSavableError(f"it is nested more than {MAX_NESTING} levels deep")
        kind = type(container)
        nest: dict[str, Encoded] = {"kind": kind.__name__}
        if isinstance(container, dict):
            nest["keys"] = self._items(container.keys(), depth)
            nest["items"] = self._items(container.values(), depth)
        else:
            nest["items"] = self._items(container, depth)
        if kind is deque:
            nest["maxlen"] = container.maxlen
        return nest

    def _items(self, entries: Any, depth: int) -> Encoded:
        entries = list(entries)
        if len(entries) > _MAX_LIST_LENGTH:
            kinds = set(map(type, entries))
            are_small = kinds == {int} and min(entries) >= -_INT64 and max(entries) < _INT64
            if are_small and not any(map(self._path_of, entries)):
                return torch.tensor(entries, dtype=torch.int64, device="cpu")
            if kinds == {float}:
                return torch.tensor(entries, dtype=torch.float64, device="cpu")
        return [self.encode(entry, depth + 1) for entry in entries]

    def _encode_iterator(self, value: Any, depth: int) -> Encoded:
        kind = type(value)
        if kind is itertools.count:
            start, step = numbers_of_count(value)
            return {"kind": "count", "start": start, "step": step}
        if kind is itertools.cycle:
            items, position = items_of_cycle(value)
            return {"kind": "cycle", "items": self._items(items, depth), "position": position}
        if kind is itertools.repeat:
            arguments: Any = value.__reduce__()[1]
            times = arguments[1] if len(arguments) == 2 else None
            item = self.encode(arguments[0], depth + 1)
            return {"kind": "repeat", "item": item, "times": times}
        if kind in SEQUENCE_ITERATORS:
            sequence, position = position_of(value)
            over = self.encode(sequence, depth + 1)
            return {"kind": "iterator", "over": over, "position": position}
        raise NotSavableError(f"it holds {a(full_name(kind))}, which can't be saved")


def class_name(kind: type) -> str:
    """Returns the name of a class, which is looked up among the classes that the task uses."""
    return f"{kind.__module__}:{kind.__qualname__}"


def plain_array(values: Any) -> Any:
    """Returns a view of an array as a plain NumPy array, without running code of a subclass."""
    numpy = sys.modules["numpy"]
    return numpy.ndarray.view(values, numpy.ndarray)


def _encode_numpy(value: Any) -> Encoded:
    if value.dtype.kind not in DTYPE_KINDS:
        raise NotSavableError(f"it holds an array of {value.dtype}")
    if is_array(value):
        return {"kind": "numpy array", "values": arrays_to_tensors(plain_array(value))}
    entries = sys.modules["numpy"].asarray(value)
    return {"kind": "numpy scalar", "values": arrays_to_tensors(entries)}
