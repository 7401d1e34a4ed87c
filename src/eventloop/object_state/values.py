"""The values of places as nests of plain values and tensors, and back; nothing is looked up by name.

A nest is what a checkpoint holds: plain values as they are, everything else a dict with the key
`kind`. Decoding builds built-in containers, numbers, arrays, tensors and random generators from a
closed list; what else a place holds must already be there, and gets its saved contents.
"""

from __future__ import annotations

import array
import ast
import importlib
import itertools
import operator
import random
import sys
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum, Flag
from typing import Any

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.errors import a
from eventloop.naming import full_name
from eventloop.object_state.walk import (
    CONTAINER_TYPES,
    MAX_NESTING,
    PLAIN_TYPES,
    is_array,
    is_seed_source,
    refill,
)
from eventloop.rng import (
    arrays_to_tensors,
    checked_numpy_state,
    get_rng_state,
    is_generator,
    set_rng_state,
    tensors_to_arrays,
)

Encoded = Any
# More than this in one place is data or a cache, which a checkpoint of every epoch isn't made for.
MAX_BYTES = 64 * 1024**2
_INT64 = 2**63
_MAX_SPAWNED = 10**4  # seeds that a resume spawns again
# Longer lists of numbers are saved as one tensor.
_LONG = 32
_MUTABLE_TYPES = {kind.__name__: kind for kind in CONTAINER_TYPES if kind not in (tuple, frozenset)}
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_GENERATORS = ("Random", "Generator", "RandomState")
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, int, float, bool, str, deque, Counter)
}
# Values of torch that are equal if they are written alike, however often they are made.
TORCH_VALUES = frozenset({torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format})
_TORCH_CONSTANTS = {
    str(value): value for value in vars(torch).values() if type(value) in TORCH_VALUES
}
_NUMBERS = "biufcmM"  # kinds of NumPy's dtypes whose entries are numbers
_SEQUENCES: tuple[Any, ...] = ([], (), range(0), range(2**70), "", b"")
_ITERATORS = tuple(
    type(iter(sequence)) for sequence in _SEQUENCES
)  # of built-in sequences, which can be set to a position


class NotSavableError(ValueError):
    """A value can't be saved, or a nest isn't that of a value; the message is the reason."""


class Encoder:
    """Encodes values. An object that is met again is encoded as a reference to the first time.

    Args:
        path_of: returns the path of an object that a new process builds again; None of any other.
        class_names: the names of classes whose instances a new process has; None for any class.
        base_of: returns the tensor whose memory a tensor or an array shares with other objects.
    """

    def __init__(
        self,
        path_of: Callable[[Any], str | None],
        class_names: Collection[str] | None = None,
        base_of: Callable[[Any], Tensor | None] = lambda value: None,
    ) -> None:
        self._path_of = path_of
        self._class_names = class_names
        self._base_of = base_of
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # kept, so that their identities stay theirs

    def encode(self, value: Any, depth: int = 0) -> Encoded:
        """Returns a value as a nest.

        Raises:
            NotSavableError: it, or an entry of it, is of a type that can't be saved.
        """
        if type(value) is complex:
            return {"kind": "complex", "parts": [value.real, value.imag]}
        if type(value) in PLAIN_TYPES:
            return value
        if (path := self._path_of(value)) is not None:
            return {"kind": "object", "path": path}
        if (number := self._numbers.get(id(value))) is not None:
            return {"kind": "same", "number": number}
        number = len(self._objects)
        if is_numbered := type(value) not in (tuple, frozenset):
            self._numbers[id(value)] = number
            self._objects.append(value)
        nest = self._encode_new(value, depth)
        return {**nest, "number": number} if is_numbered else nest

    def _encode_new(self, value: Any, depth: int) -> Encoded:
        """Returns an object that a new process has to make, as a nest; raises NotSavableError."""
        kind = type(value)
        if isinstance(value, Tensor) or is_array(value):
            base = self._base_of(value)
            if base is not None:
                return self._encode_view(value, base, depth)
        is_own_class = is_generator(value) and kind.__name__ not in _GENERATORS
        if (
            is_own_class
            or is_seed_source(value)
            or (is_array(value) and not _is_plain_array(value))
        ):
            raise NotSavableError(f"it holds {a(full_name(kind))} that was made since")
        is_factory_code = kind is defaultdict and value.default_factory not in _FACTORIES.values()
        if is_factory_code and self._class_names is not None:
            raise NotSavableError("the factory of a defaultdict that was made since isn't saved")
        nest = self.encode_contents(value, depth)
        if kind is defaultdict:
            names = (name for name, kind in _FACTORIES.items() if kind is value.default_factory)
            nest["factory"] = next(names, None)
        return nest

    def _encode_view(self, view: Any, base: Tensor, depth: int) -> Encoded:
        if not isinstance(view, Tensor):
            raise NotSavableError("it shares the memory of another array or tensor")
        return {
            "kind": "view",
            "of": self.encode(base, depth + 1),
            "shape": list(view.shape),
            "strides": list(view.stride()),
            "offset": view.storage_offset(),
        }

    def _class_name(self, kind: type) -> str:
        name = class_name(kind)
        if self._class_names is not None and name not in self._class_names:
            raise NotSavableError(f"the task has built no {full_name(kind)}")
        return name

    def encode_contents(self, value: Any, depth: int = 0) -> Encoded:
        """Returns what an object holds, as a nest; raises NotSavableError."""
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
            return {
                "kind": "enum",
                "class": self._class_name(kind),
                "name": value._name_,
                "flags": value._value_ if isinstance(value, Flag) else None,
            }
        if kind in TORCH_VALUES:
            return _encode_torch_value(value)
        if (nest := _encode_number(value)) is not None:
            return nest
        if (nest := self._encode_iterator(value, depth)) is not None:
            return nest
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = self._items(tuple(value), depth)
            return {"kind": "namedtuple", "class": self._class_name(kind), "items": items}
        raise NotSavableError(f"it holds {a(full_name(kind))}")

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
        if len(entries) > _LONG:
            kinds = set(map(type, entries))
            if kinds == {int} and min(entries) >= -_INT64 and max(entries) < _INT64:
                return torch.tensor(entries, dtype=torch.int64, device="cpu")
            if kinds == {float}:
                return torch.tensor(entries, dtype=torch.float64, device="cpu")
        return [self.encode(entry, depth + 1) for entry in entries]

    def _encode_iterator(self, value: Any, depth: int) -> Encoded | None:
        if type(value) is itertools.count:
            start, step = _numbers_of_count(value)
            return {"kind": "count", "start": start, "step": step}
        if type(value) is itertools.cycle:
            items, position = _items_of_cycle(value)
            return {"kind": "cycle", "items": self._items(items, depth), "position": position}
        if type(value) is itertools.repeat:
            arguments: Any = value.__reduce__()[1]
            times = arguments[1] if len(arguments) == 2 else None
            item = self.encode(arguments[0], depth + 1)
            return {"kind": "repeat", "item": item, "times": times}
        if type(value) in _ITERATORS:
            sequence, position = _position_of(value)
            over = self.encode(sequence, depth + 1)
            return {"kind": "iterator", "over": over, "position": position}
        return None


def encode_tensor(tensor: Tensor) -> Encoded:
    """Returns a copy of a tensor, with its memory format.

    Raises:
        NotSavableError: it isn't dense, or a part of a tensor that is spread over ranks.
    """
    if not is_plain_tensor(tensor):
        raise NotSavableError(f"it holds {a(type(tensor).__name__)} of {tensor.layout}")
    if tensor.nbytes > MAX_BYTES:
        size, limit = tensor.nbytes // 1024**2, MAX_BYTES // 1024**2
        raise NotSavableError(f"it is a tensor of {size:,} MiB, and at most {limit} are saved")
    return {
        "kind": "tensor",
        "values": tensor.detach().clone(),
        "strides": list(tensor.stride()),
        "is_on_host": kind_of(tensor.device).is_host,
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
    }


def is_plain_tensor(tensor: Tensor) -> bool:
    """Returns whether a tensor's entries are values in rows of the same length, all on this rank."""
    classes = (Tensor, torch.nn.Parameter)
    is_plain = type(tensor) in classes or type(tensor) is kind_of(tensor.device).tensor_class
    is_dense = tensor.layout is torch.strided
    return is_plain and is_dense and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def encode_generator(generator: Any) -> Encoded:
    """Returns the state of a random generator of Python, NumPy or torch."""
    bits = getattr(generator, "bit_generator", None)
    if isinstance(generator, random.SystemRandom):
        raise NotSavableError("numbers of the operating system can't be drawn again")
    return {
        "kind": "generator",
        "library": _library_of(generator),
        "bits": "" if bits is None else type(bits).__name__,
        "state": get_rng_state(generator),
    }


def encode_seed_source(source: Any) -> Encoded:
    """Returns the state of a bit generator of NumPy, or how many seeds a sequence has given."""
    if hasattr(source, "n_children_spawned"):
        return {"kind": "seeds", "num_spawned": source.n_children_spawned}
    return {
        "kind": "bits",
        "bits": type(source).__name__,
        "state": arrays_to_tensors(source.state),
    }


def class_name(kind: type) -> str:
    """Returns the name by which a class is looked up among those that the task uses."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_plain_array(value: Any) -> bool:
    return type(value) is sys.modules["numpy"].ndarray


def plain_array(values: Any) -> Any:
    """Returns the entries of an array of any class, without code of that class."""
    numpy = sys.modules["numpy"]
    return numpy.ndarray.view(values, numpy.ndarray)


def _fill_seed_source(source: Any, nest: Encoded) -> None:
    if nest["kind"] == "bits":
        if type(source).__name__ != nest["bits"]:
            raise NotSavableError(f"it is a {type(source).__name__} here")
        source.state = checked_numpy_state(tensors_to_arrays(nest["state"]))
        return
    num_due = operator.index(nest["num_spawned"]) - source.n_children_spawned
    if not 0 <= num_due <= _MAX_SPAWNED:
        raise NotSavableError(f"{num_due} more seeds can't be spawned")
    source.spawn(num_due)


def _encode_torch_value(value: Any) -> Encoded:
    if isinstance(value, torch.Size):
        return {"kind": "size", "items": list(value)}
    if isinstance(value, torch.device):
        return {"kind": "device", "is_host": kind_of(value).is_host}
    return {"kind": "torch constant", "name": str(value)}


def _library_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return "torch"
    if isinstance(generator, random.Random):
        return "python"
    return "numpy" if hasattr(generator, "bit_generator") else "numpy legacy"


def _encode_number(value: Any) -> Encoded | None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.kind not in _NUMBERS + "SU":
            raise NotSavableError(f"it holds an array of {value.dtype}")
        is_scalar = isinstance(value, numpy.generic)
        entries = numpy.asarray(value) if is_scalar else plain_array(value)
        nest = arrays_to_tensors(entries)
        return {"kind": "numpy scalar" if is_scalar else "numpy array", "values": nest}
    if type(value) is array.array:
        return {"kind": "array", "typecode": value.typecode, "bytes": value.tobytes()}
    if type(value) is bytearray:
        return {"kind": "bytearray", "bytes": bytes(value)}
    if type(value) is range:
        return {"kind": "range", "parts": [value.start, value.stop, value.step]}
    return None


def _numbers_of_count(count: itertools.count[Any]) -> tuple[Any, Any]:
    """Reads start and step from the representation, which later Pythons have without `__reduce__`."""
    text = repr(count).removeprefix("count")
    try:
        numbers = ast.literal_eval(text if "," in text else f"({text[1:-1]},)")
    except (ValueError, SyntaxError):
        raise NotSavableError("it holds a count of other things than numbers") from None
    return numbers if len(numbers) == 2 else (*numbers, 1)


def _items_of_cycle(cycle: itertools.cycle[Any]) -> tuple[list[Any], int]:
    """Returns the items of a cycle in order, and how many of them the current round has yielded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            state: Any = cycle.__reduce__()
        _, (inner,), (saved, is_first_done) = state
    except (AttributeError, TypeError, ValueError):  # Python 3.14 has no such method
        raise NotSavableError("it holds an itertools.cycle, whose position can't be read") from None
    if type(inner) not in _ITERATORS:
        raise NotSavableError(f"it holds a cycle over a {type(inner).__name__}")
    sequence, position = _position_of(inner)
    left = list(sequence)[position:]
    if is_first_done:
        num_yielded = len(saved) - len(left)
        return [*saved], num_yielded % max(len(saved), 1)
    return [*saved, *left], len(saved)


def _position_of(iterator: Any) -> tuple[Any, int]:
    """Returns the sequence that a built-in iterator is over, and its position in it."""
    _, (sequence,), *position = iterator.__reduce__()
    return sequence, position[0] if position else 0


class Decoder:
    """Rebuilds values from nests, in the order in which they were encoded.

    Args:
        objects: what the task has built, by path.
        device: where tensors are put that weren't on the host.
        classes: of enums and named tuples, those that the objects use, by name.
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
            predecessor: what the place holds, of which classes are taken that a nest doesn't name.

        Raises:
            NotSavableError, LookupError, TypeError, ValueError, RuntimeError, AttributeError: no
                value has this nest, or not in this place.
        """
        if not isinstance(nest, Mapping):
            return nest
        kind = nest["kind"]
        if kind == "object":
            return self._objects[nest["path"]]
        if kind == "same":
            return self._numbered[nest["number"]]
        if kind in _MUTABLE_TYPES:
            value = self._empty(nest, predecessor)
            self._numbered[nest["number"]] = value
            self._refill(value, nest, predecessor)
            return value
        value = self._value(kind, nest, predecessor)
        if "number" in nest:
            self._numbered[nest["number"]] = value
        return value

    def decode_contents(self, nest: Encoded, target: Any) -> None:
        """Replaces the contents of an object by saved ones; raises as `decode` does."""
        kind = nest["kind"]
        if kind in ("bits", "seeds") and is_seed_source(target):
            _fill_seed_source(target, nest)
        elif kind in _MUTABLE_TYPES:
            if type(target) is not _MUTABLE_TYPES[kind]:
                raise NotSavableError(f"it is {a(type(target).__name__)} here, and was a {kind}")
            self._refill(target, nest, target)
        elif kind == "tensor" and isinstance(target, Tensor):
            _fill_tensor(target, nest)
        elif kind == "generator" and is_generator(target):
            _fill_generator(target, nest)
        elif kind == "numpy array":
            values = _decode_numpy(nest)
            entries = plain_array(target) if is_array(target) else target
            if entries.shape != values.shape:
                target.resize(values.shape, refcheck=False)
                entries = plain_array(target)
            entries[...] = values
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
            case "size":
                return torch.Size(map(operator.index, nest["items"]))
            case "device":
                return torch.device("cpu") if nest["is_host"] else self._device
            case "torch constant":
                return _TORCH_CONSTANTS[nest["name"]]
            case "enum":
                return self._enum(nest, predecessor)
            case "generator":
                return _new_generator(nest)
            case "tensor":
                return self._new_tensor(nest)
            case "count":
                return itertools.count(nest["start"], nest["step"])
            case "repeat":
                times = () if nest["times"] is None else (operator.index(nest["times"]),)
                return itertools.repeat(self.decode(nest["item"]), *times)
            case "view":
                return self._view(nest)
            case "cycle":
                return self._cycle(nest)
            case "iterator":
                return self._iterator(nest)
        raise NotSavableError(f"{kind!r} isn't a kind of value")

    def _empty(self, nest: Encoded, predecessor: Any) -> Any:
        kind = _MUTABLE_TYPES[nest["kind"]]
        if kind is defaultdict:
            if nest.get("factory") is not None:
                return defaultdict(_FACTORIES[nest["factory"]])
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
        # The implementation of the base class, as a class may have one of its own.
        flags = operator.index(nest["flags"])
        known: Enum | None = kind._value2member_map_.get(flags)
        if known is not None:
            return known
        missing: Any = Flag._missing_
        combined: Enum = missing.__func__(kind, flags)
        return combined

    def _view(self, nest: Encoded) -> Tensor:
        base = self.decode(nest["of"])
        if type(base) not in (Tensor, torch.nn.Parameter):
            raise NotSavableError(f"a view of {a(type(base).__name__)} isn't saved")
        memory = torch.empty(0, dtype=base.dtype, device=base.device)
        memory.set_(base.untyped_storage())
        sizes = map(operator.index, nest["shape"])
        strides = map(operator.index, nest["strides"])
        # Raises RuntimeError beyond the memory of the base.
        return memory.as_strided([*sizes], [*strides], operator.index(nest["offset"]))

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

    def _new_tensor(self, nest: Encoded) -> Tensor:
        device = torch.device("cpu") if nest["is_on_host"] else self._device
        tensor = laid_out(nest["values"], nest["strides"], device)
        return tensor.requires_grad_(bool(nest["requires_grad"]))


def _sequence(predecessor: Any) -> Sequence[Any]:
    """Returns the entries of what a place holds, if they have an order."""
    return list(predecessor) if isinstance(predecessor, (list, tuple, deque)) else ()


def _fill_tensor(tensor: Tensor, nest: Encoded) -> None:
    values: Tensor = nest["values"]
    strides = tuple(nest["strides"])
    is_alike = tensor.shape == values.shape and tensor.dtype == values.dtype
    if is_alike and tensor.stride() == strides and 0 not in strides:
        tensor.detach().copy_(values)
    else:  # expanded, or an assignment to `tensor.data` had changed it
        tensor.data = laid_out(values, strides, tensor.device)


def laid_out(values: Tensor, strides: Sequence[int], device: torch.device) -> Tensor:
    """Returns a copy of a tensor with these strides; contiguous if entries would share memory.

    Raises:
        ValueError: the strides don't suit the shape.
    """
    if len(strides) != values.ndim or any(stride < 0 for stride in strides):
        raise ValueError(f"{strides} aren't strides of a tensor of shape {tuple(values.shape)}")
    # Strides come from a file: as many entries as the shape has, and no two in one place.
    order = sorted(range(values.ndim), key=lambda dim: (strides[dim], values.shape[dim]))
    num_entries = 1
    for dim in order:
        if values.shape[dim] > 1 and strides[dim] != num_entries:
            return values.to(device, copy=True).contiguous()
        num_entries *= values.shape[dim]
    tensor = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=device)
    return tensor.copy_(values)


def _fill_generator(generator: Any, nest: Encoded) -> None:
    bits = getattr(generator, "bit_generator", None)
    kind = _library_of(generator), "" if bits is None else type(bits).__name__
    if kind != (nest["library"], nest["bits"]):
        raise NotSavableError(f"it is a generator of {kind[0]} {kind[1]} here".rstrip())
    set_rng_state(generator, nest["state"])


def _new_generator(nest: Encoded) -> Any:
    library, bits = nest["library"], nest["bits"]
    generator: Any
    if library == "torch":
        generator = torch.Generator()
    elif library == "python":
        generator = random.Random()
    elif library == "numpy legacy":
        generator = importlib.import_module("numpy").random.RandomState()
    elif library == "numpy" and bits in _BIT_GENERATORS:
        numpy_random = importlib.import_module("numpy").random
        generator = numpy_random.Generator(getattr(numpy_random, bits)())
    else:
        raise NotSavableError(f"a generator of {library!r} with {bits!r} can't be made")
    set_rng_state(generator, nest["state"])
    return generator


def _decode_array(nest: Encoded) -> array.array[Any]:
    if nest["typecode"] not in tuple("bBhHiIlLqQfd"):
        raise NotSavableError(f"{nest['typecode']!r} isn't a type of an array's numbers")
    return array.array(nest["typecode"], nest["bytes"])


def _decode_numpy(nest: Encoded) -> Any:
    numpy = importlib.import_module("numpy")
    dtype = numpy.dtype(nest["values"]["array"])
    if dtype.kind not in _NUMBERS + "SU" or dtype.fields or dtype.subdtype:
        raise NotSavableError(f"arrays of {dtype} aren't saved")
    return tensors_to_arrays(nest["values"])
