"""What has changed in objects since a run was built: saved, restored in place, or named.

A task builds its objects anew when a run is resumed. So a checkpoint needs what has changed in them
since they were built, and the states of random generators. Values are put back into the objects that
the task has built; an object that only the run has made can't be, and is named.
"""

from __future__ import annotations

import array
import concurrent.futures
import io
import itertools
import logging
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.errors import a, first_of
from eventloop.naming import full_name
from eventloop.object_state.values import (
    MAX_BYTES,
    TORCH_VALUES,
    Decoder,
    Encoded,
    Encoder,
    NotSavableError,
    class_name,
    encode_seed_source,
    is_plain_tensor,
    plain_array,
)
from eventloop.object_state.walk import (
    CONTAINER_TYPES,
    MAX_ENTRIES,
    MAX_NESTING,
    PLAIN_TYPES,
    Location,
    Walk,
    attribute_location,
    class_attribute_location,
    has_identity,
    is_array,
    is_attribute,
    is_entered,
    is_of_trainer,
    is_seed_source,
    walk,
)
from eventloop.rng import is_generator

# Objects by which a process works; a run that makes them when it needs them makes them again.
_HANDLES = (
    logging.Logger,
    logging.Handler,
    threading.Thread,
    concurrent.futures.Executor,
    type(threading.Lock()),
    type(threading.RLock()),
)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_IO_TYPES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedReader, io.FileIO)
_NUM_SAMPLED = 4096  # entries of a large tensor, array or list of numbers
_NUM_SAMPLED_OBJECTS = 256  # entries of a long list of other things
_MAX_COMPARED = 1_000_000  # entries of a list of plain values


class TrackedObjects:
    """The state of objects that have no `state_dict`, or more state than it holds.

    Args:
        roots: the objects by name, as they were built.
        apart: objects whose state is saved elsewhere; they aren't entered.
        weights: returns the tensors whose values are saved elsewhere.
        device: where tensors of a checkpoint go if they weren't on the host.
        needs_all: whether all that the run has changed must be saved. Of objects that are read by
            index only iterators count: what else can't be saved is a file or a cache.
        max_bytes: more than this in one location isn't saved.

    Attributes:
        lost: why the latest state lacks something, by the path of the location.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        apart: Iterable[Any] = (),
        weights: Callable[[], Iterable[Tensor]] = tuple,
        device: torch.device | None = None,
        *,
        needs_all: bool = True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._roots = dict(roots)
        self._apart = {id(thing): thing for thing in apart}  # kept, so that identities stay theirs
        self._weights = weights
        self._needs_all = needs_all
        self._max_bytes = max_bytes
        self._device = device or torch.device("cpu")
        self.lost: dict[str, str] = {}
        built = walk(self._roots, self._apart)
        self._objects = built.objects  # kept, likewise
        self._paths = {id(value): path for path, value in built.objects.items()}
        weight_ids = self._weight_ids()
        self._weight_paths = {
            path for path, value in built.objects.items() if id(value) in weight_ids
        }
        self._places = {
            path: (fingerprint(place.value), place.owner, place.delete is not None)
            for path, place in built.places.items()
        }
        self._code_of_start: dict[str, Any] = {}
        self._has_saved = False
        self._classes = _classes_in(built.places.values())
        self._contents = {
            path: fingerprint_of_contents(value)
            for path, value in built.objects.items()
            if has_identity(value) and id(value) not in weight_ids
        }
        self._shapes = {
            path: tuple(value.shape)
            for path, value in built.objects.items()
            if path in self._contents and _has_shape(value)
        }

    def state_dict(self, *, only_changes: bool = True) -> dict[str, Any]:
        """Returns what has changed since the objects were built.

        Args:
            only_changes: False for all that can be saved, changed or not.

        Returns:
            `contents`: of containers, tensors, arrays and generators, by the object's path;
            `values`: of attributes and other places, by path; `gone`: the paths of attributes that
            were deleted; `lost`: why something can't be saved, by path.
        """
        current = self._walk()
        memory = SharedMemory(current.objects.values(), self._objects.values())
        encoder = Encoder(
            lambda value: self._paths.get(id(value)), self._classes.keys(), memory.base_of
        )
        lost: dict[str, str] = {}
        contents: dict[str, Encoded] = {}
        for path, value in current.objects.items():
            if path not in self._contents or self._objects[path] is not value:
                continue  # new: saved where it is referred to
            has_changed = self._contents[path] != fingerprint_of_contents(value)
            if only_changes and not has_changed and not is_generator(value):
                continue
            with _noted(lost, path):
                nest = encoder.encode_contents(value)
                self._require_small(nest)
                if path in self._shapes:
                    nest["built_shape"] = list(self._shapes[path])
                contents[path] = nest
        values: dict[str, Encoded] = {}
        weight_ids = self._weight_ids()
        lost_owners: set[str] = set()
        for path, place in current.places.items():
            if place.owner in lost_owners:
                lost_owners.add(path)
                continue
            if path in self._weight_paths or id(place.value) in weight_ids:
                continue
            if _gives_nothing(place.value):
                continue
            if place.assign is None and path in self._places:
                if self._places[path][0] != fingerprint(place.value):
                    owner = current.objects.get(place.owner)
                    if not _has_contents(owner):
                        lost[path] = "it can't be replaced where it is"
                continue  # an entry, which its container has
            is_due = path not in self._places or self._places[path][0] != fingerprint(place.value)
            if not is_due and (only_changes or type(place.value) not in PLAIN_TYPES):
                continue
            if isinstance(place.value, _CODE) and self._is_of_start(path, place.value):
                lost_owners.add(path)
                continue
            with _noted(lost, path):
                self._require_known_location(place)
                if place.assign is not None:
                    nest = encoder.encode(place.value)
                    self._require_small(nest)
                    values[path] = nest
            if path in lost:
                lost_owners.add(path)
        lost |= dict.fromkeys(
            self._iterators_in(current), "the position of the iterator isn't readable"
        )
        if not self._needs_all:
            lost = {path: lost[path] for path in self._iterators_in(current)}
        self.lost = lost if only_changes else {}
        self._has_saved |= only_changes
        gone = [
            path
            for path, (_, owner, is_deletable) in self._places.items()
            if is_deletable and path not in current.places and owner in current.objects
        ]
        return {"contents": contents, "values": values, "gone": gone, "lost": dict(self.lost)}

    def have_changed(self) -> bool:
        """Returns whether anything but the states of generators differs from when it was built."""
        state = self.state_dict()
        contents = [nest for nest in state["contents"].values() if nest["kind"] != "generator"]
        return bool(contents or state["values"] or state["gone"] or state["lost"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into the objects as they are.

        Warns of places that aren't there any more, or hold an object of another kind or shape.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError, AttributeError: no run has saved this.
        """
        places = self._walk().places
        decoder = Decoder(self._objects, self._device, self._classes)
        misfits: list[str] = []
        for path, nest in state["contents"].items():
            target = self._objects.get(path)
            if (reason := _why_unlike(nest, target, self._contents.get(path))) is not None:
                misfits.append(f"{path} {reason}")
            else:
                decoder.decode_contents(nest, target)
        for path, nest in state["values"].items():
            place = places.get(path) or self._new_location(path)
            if place is None:
                misfits.append(f"{path} isn't there")
                continue
            value = decoder.decode(nest, place.value)
            if place.assign is None or not _is_replaceable(place.value, value):
                misfits.append(f"{path} is {a(full_name(type(place.value)))}")
                continue
            place.assign(value)
        self._reset_plain_values(places, state)
        for path in state["gone"]:
            place = places.get(path)
            if (
                place is not None
                and place.delete is not None
                and _is_replaceable(place.value, None)
            ):
                place.delete()
        if misfits:
            warnings.warn(
                "the checkpoint has values that don't fit the objects of this run, and that stay as "
                f"they are built: {first_of(misfits)}",
                stacklevel=2,
            )

    def _reset_plain_values(self, places: Mapping[str, Location], state: Mapping[str, Any]) -> None:
        """Sets plain values that this process has changed since, and the saved run hadn't.

        A data set that is told its epoch before its state is loaded may count that.
        """
        for path, place in places.items():
            if path in state["values"] or place.assign is None or path not in self._places:
                continue
            built = self._places[path][0]
            if type(place.value) in PLAIN_TYPES and built != fingerprint(place.value):
                kind, value = built
                if kind in PLAIN_TYPES:
                    place.assign(kind(value) if kind in (float, complex) else value)

    def unsavable_iterators(self) -> list[str]:
        """Returns the paths of iterators whose positions can't be saved."""
        return self._iterators_in(self._walk())

    def _iterators_in(self, current: Walk) -> list[str]:
        encoder = Encoder(lambda value: None)
        paths = []
        for path, location in current.places.items():
            value = location.value
            if not isinstance(value, Iterator) or is_entered(value) or _gives_nothing(value):
                continue
            if isinstance(value, io.IOBase) and not self._needs_all:
                continue  # a file that is read by index is sought before each read
            try:
                encoder.encode(value)
            except NotSavableError:
                paths.append(path)
        return paths

    def _is_of_start(self, path: str, code: Any) -> bool:
        """Returns whether a function was there at the first save: the start of a process puts it there."""
        if not self._has_saved:
            self._code_of_start[path] = code
        return self._code_of_start.get(path) is code

    def _walk(self) -> Walk:
        return walk(self._roots, self._apart, self._paths)

    def _weight_ids(self) -> set[int]:
        return set(map(id, self._weights()))

    def _require_known_location(self, place: Location) -> None:
        """Raises NotSavableError unless the place exists in a new process, or is an attribute."""
        if place.path not in self._places and place.assign is not None and place.delete is None:
            raise NotSavableError("it was made since the run was built")

    def _require_small(self, encoded: Encoded) -> None:
        if (num_bytes := _num_bytes(encoded)) > self._max_bytes:
            size, limit = num_bytes / 1024**2, self._max_bytes / 1024**2
            raise NotSavableError(f"it has {size:,.1f} MiB, and at most {limit:,.0f} are saved")

    def _new_location(self, path: str) -> Location | None:
        """Returns the place of an attribute that the run has added to an object of the task's."""
        owner_path, _, name = path.rpartition(".")
        owner = self._objects.get(owner_path)
        if isinstance(owner, type):
            is_code = callable(vars(owner).get(name)) or hasattr(vars(owner).get(name), "__get__")
            is_new = name.isidentifier() and not name.startswith("__") and not is_code
            return class_attribute_location(owner, name, owner_path) if is_new else None
        if owner is None or not is_attribute(owner, name):
            return None
        return attribute_location(owner, name, owner_path)


class SharedMemory:
    """Which tensors and arrays share memory.

    Args:
        objects: all that are in use; others among them are ignored.
        built: those that a new process has, too.
    """

    def __init__(self, objects: Iterable[Any], built: Iterable[Any]) -> None:
        self._objects = objects
        self._built = built
        self._groups: dict[int, list[Any]] | None = None
        self._built_ids: set[int] = set()
        self._bases: dict[int, Tensor] = {}

    def base_of(self, value: Any) -> Tensor | None:
        """Returns a tensor with the memory of a new one, if the memory is in use elsewhere."""
        if self._groups is None:
            self._groups = {}
            self._built_ids = set(map(id, self._built))
            for other in self._objects:
                if (address := _address(other)) is not None:
                    self._groups.setdefault(address, []).append(other)
        address = _address(value)
        if address is None or value is self._bases.get(address):
            return None
        group = self._groups.get(address, [])
        if not [other for other in group if other is not value]:
            return None
        if address not in self._bases:
            self._bases[address] = self._base_of_group(value, group)
        return self._bases[address]

    def _base_of_group(self, value: Any, group: list[Any]) -> Tensor:
        if not all(isinstance(member, Tensor) and member.dtype == value.dtype for member in group):
            raise NotSavableError("it shares the memory of an array or tensor of another kind")
        for member in group:
            if id(member) in self._built_ids:
                base: Tensor = member
                return base
        memory = torch.empty(0, dtype=value.dtype, device=value.device)
        memory.set_(value.untyped_storage())
        return memory


def _address(value: Any) -> int | None:
    """Returns where the memory of a tensor or an array begins; None of anything else."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
        return value.untyped_storage().data_ptr() or None if is_plain else None
    if not is_array(value):
        return None
    while is_array(value.base):
        value = value.base
    address: int = value.__array_interface__["data"][0]
    return address if value.size else None


def _classes_in(places: Iterable[Location]) -> dict[str, type]:
    """Returns the enums and named tuples that objects use, by name."""
    classes: dict[str, type] = {}
    waiting = [(place.value, 0) for place in places]
    while waiting:
        value, depth = waiting.pop()
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            classes[class_name(kind)] = kind
        if type(value) in CONTAINER_TYPES and depth < MAX_NESTING and len(value) <= MAX_ENTRIES:
            entries = [*value, *value.values()] if isinstance(value, dict) else [*value]
            waiting += [(entry, depth + 1) for entry in entries if type(entry) not in PLAIN_TYPES]
    return classes


@contextmanager
def restored_objects(**roots: Any) -> Iterator[None]:
    """Restores objects after a block to what they were before it, as far as that can be saved."""
    objects = TrackedObjects(roots)
    state = objects.state_dict(only_changes=False)
    try:
        yield
    finally:
        changed = objects.state_dict()["contents"]
        contents = {path: nest for path, nest in state["contents"].items() if path in changed}
        objects.load_state_dict({**state, "contents": contents})


@contextmanager
def _noted(lost: dict[str, str], path: str) -> Iterator[None]:
    """Notes that a value can't be saved, and why."""
    try:
        yield
    except NotSavableError as error:
        lost[path] = str(error)


def fingerprint(value: Any) -> Any:
    """Returns what differs if a place holds another value, without running code of its class.

    An object is compared by its identity, see `fingerprint_of_contents` for what it holds.
    """
    kind = type(value)
    if kind in (float, complex):
        return kind, repr(value)  # a NaN is equal to itself
    if kind in PLAIN_TYPES or kind in TORCH_VALUES:
        return kind, value
    if kind in (tuple, frozenset):
        return kind, _fingerprint_of_entries(value)
    if kind.__module__ == "numpy" and kind.__name__ != "ndarray" and hasattr(value, "tobytes"):
        return kind, value.tobytes()
    if kind.__module__ in ("builtins", "itertools") and not has_identity(value):
        return _fingerprint_of_builtin(value)
    return kind, id(value)


def fingerprint_of_contents(value: Any) -> Any:
    """Returns what differs if a container, tensor, array or generator holds other contents.

    Large ones are compared by some of their entries.
    """
    kind = type(value)
    if kind in CONTAINER_TYPES:
        return len(value), _fingerprint_of_entries(value)
    if isinstance(value, Tensor):
        return _fingerprint_of_tensor(value)
    if is_generator(value):
        return None  # always saved
    if is_seed_source(value):
        return repr(encode_seed_source(value))
    if kind in (bytearray, array.array):
        return bytes(value)
    return _fingerprint_of_array(value)


def _fingerprint_of_entries(container: Any) -> Any:
    if isinstance(container, dict):
        entries: Iterable[Any] = itertools.chain(container.keys(), container.values())
    else:
        entries = container
    if isinstance(container, (set, frozenset)):
        return frozenset(fingerprint(entry) for entry in entries)
    entries = list(entries)
    if len(entries) > _NUM_SAMPLED:
        has_objects = not set(map(type, entries)) <= PLAIN_TYPES
        num_compared = _NUM_SAMPLED_OBJECTS if has_objects else _MAX_COMPARED
        entries = entries[:: 1 + len(entries) // num_compared]
        if not has_objects:
            return hash(tuple(entries))
    return tuple(fingerprint(entry) for entry in entries)


def _has_shape(value: Any) -> bool:
    return is_plain_tensor(value) if isinstance(value, Tensor) else hasattr(type(value), "shape")


def _fingerprint_of_tensor(tensor: Tensor) -> Any:
    version = None if tensor.is_inference() else tensor._version
    facts: tuple[Any, ...] = (tensor.dtype, tensor.requires_grad, version)
    if not is_plain_tensor(tensor):
        return facts
    facts = (*facts, tensor.shape, tensor.stride(), tensor.data_ptr())
    if not kind_of(tensor.device).is_host or not tensor.is_contiguous():
        return facts  # what is on a device is compared without waiting for it
    flat = tensor.detach().flatten()
    sample = flat[:: max(1, len(flat) // _NUM_SAMPLED)].contiguous()
    return *facts, zlib.crc32(sample.view(torch.uint8).numpy().tobytes())


def _fingerprint_of_array(values: Any) -> Any:
    facts = values.shape, str(values.dtype)
    if values.dtype.hasobject:  # compared by identity: no code of theirs runs
        return *facts, tuple(map(fingerprint, values.flat)) if values.size < _NUM_SAMPLED else None
    flat = plain_array(values).reshape(-1)
    return *facts, zlib.crc32(flat[:: max(1, flat.size // _NUM_SAMPLED)].tobytes())


def _fingerprint_of_builtin(value: Any) -> Any:
    """Compares bytearrays, ranges and iterators by what would be saved of them."""
    try:
        return type(value), repr(Encoder(lambda entry: None).encode(value))
    except NotSavableError:
        return "object", id(value)


def _num_bytes(nest: Encoded) -> int:
    if isinstance(nest, Tensor):
        return nest.nbytes
    if isinstance(nest, Mapping):
        return sum(map(_num_bytes, nest.values()))
    if isinstance(nest, (list, tuple)):
        return sum(map(_num_bytes, nest))
    return len(nest) if isinstance(nest, (str, bytes)) else 8


def _why_unlike(nest: Encoded, target: Any, built: Any) -> str | None:
    """Returns why an object can't take saved contents; None if it can.

    Args:
        built: the fingerprint of its contents when it was built; None if there is no such object.
    """
    if target is None or (built is None and not is_generator(target)):
        return "isn't there"
    if not has_identity(target):
        return f"is {a(full_name(type(target)))}"
    shape = nest.get("built_shape")
    if shape is not None and tuple(shape) != tuple(target.shape):
        return f"has the shape {tuple(target.shape)}, and had {tuple(shape)}"
    return None


def _gives_nothing(value: Any) -> bool:
    """Returns whether training can't depend on an object: a log, a lock, a thread, a file to write."""
    if type(value) in _IO_TYPES:
        return bool(value.closed) or not value.readable()
    # The objects of a trainer, to which a module may refer, are made at each start.
    module_name: object = type(value).__module__  # a descriptor, of functions of C
    if isinstance(module_name, str) and is_of_trainer(module_name) and not is_entered(value):
        return True
    return isinstance(value, _HANDLES)


def _has_contents(owner: Any) -> bool:
    """Returns whether an object's entries are a part of its contents, or of another state."""
    return has_identity(owner) or isinstance(
        owner, (tuple, frozenset, torch.nn.Module, torch.optim.Optimizer)
    )


def _is_replaceable(current: Any, value: Any) -> bool:
    """Returns whether a saved value may replace an object: not code, nor one of another class."""
    return (
        type(current) is type(value)
        or type(current) in PLAIN_TYPES | TORCH_VALUES
        or isinstance(current, (tuple, frozenset, Enum))
        or has_identity(current)
        or (
            type(current).__module__ in ("numpy", "itertools", "builtins") and not callable(current)
        )
    )
