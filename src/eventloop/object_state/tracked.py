"""What has changed in objects since a run was built: saved, restored in place, or named.

A task builds its objects anew when a run is resumed. So a checkpoint needs what has changed in them
since they were built, and the states of random generators. Values are put back into the objects that
the task has built. An object that only the run has made can't be restored, and is named.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import io
import logging
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop.errors import a, first_of
from eventloop.naming import full_name
from eventloop.object_state.attributes import (
    Location,
    attribute_location,
    class_attribute_location,
    is_attribute,
    is_class_attribute,
)
from eventloop.object_state.decoding import Decoder
from eventloop.object_state.entering import (
    CONTAINER_TYPES,
    MAX_ENTRIES,
    MAX_NESTING,
    PLAIN_TYPES,
    has_identity,
    is_entered,
    is_of_trainer,
    is_own_code,
)
from eventloop.object_state.fingerprints import (
    Many,
    fingerprint,
    fingerprint_of_contents,
    fingerprint_of_many,
)
from eventloop.object_state.not_savable import NotSavableError
from eventloop.object_state.tensor_memory import MAX_BYTES, SharedMemory, is_plain_tensor
from eventloop.object_state.torch_values import TORCH_VALUES
from eventloop.object_state.values import Encoded, Encoder, class_name
from eventloop.object_state.walk import MAX_OBJECTS, Walk, walk, where_most_are
from eventloop.rng import is_generator

# Handles of a process. A run that makes them when it needs them makes them again.
_HANDLES = (
    logging.Logger,
    logging.Handler,
    threading.Thread,
    threading.Condition,
    concurrent.futures.Executor,
    type(threading.Lock()),
    type(threading.RLock()),
)
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_IO_TYPES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedReader, io.FileIO)


class BuiltLocation(NamedTuple):
    """A location as it was when the run was built.

    Attributes:
        value: as it was; referenced, like all objects that were built.
        fingerprint: of the value.
        owner: the path of the object that holds the value.
        is_deletable: whether it is an attribute that can be deleted.
    """

    value: Any
    fingerprint: Any
    owner: str
    is_deletable: bool


class BuiltContents(NamedTuple):
    """The contents of an object when the run was built.

    Attributes:
        fingerprint: of the contents.
        shape: of a tensor or an array; None of any other object.
    """

    fingerprint: Any
    shape: tuple[int, ...] | None


class TrackedObjects:
    """The state of objects that have no `state_dict`, or more state than it holds.

    Args:
        roots: the objects by name, as they were built.
        apart: objects whose state is saved elsewhere; they aren't entered.
        weights: returns the tensors whose values are saved elsewhere.
        device: where tensors of a checkpoint go if they weren't on the host.
        needs_all: whether all that the run has changed must be saved. Of objects that are read by
            index only iterators count: other values that can't be saved are files or caches.
        max_bytes: the largest size of the value of a location that is saved.
        is_run_state: whether checkpoints have the state, so that a warning says what they lack.

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
        is_run_state: bool = True,
    ) -> None:
        self._roots = dict(roots)
        # Referenced, so that no identity is used again.
        self._apart = {id(value): value for value in apart}
        self._weights = weights
        self._needs_all = needs_all
        self._max_bytes = max_bytes
        self._device = device or torch.device("cpu")
        self._code_of_start: dict[str, Any] = {}
        self._has_saved = False
        self.lost: dict[str, str] = {}
        built = walk(self._roots, self._apart)
        self._remember(built)
        if built.beyond and is_run_state:
            warnings.warn(
                f"only the first {MAX_OBJECTS:,} objects of {', '.join(self._roots)} are looked at for "
                f"changes to save; most of them are in {self._largest_part(built)}. If the run changes others, its "
                "checkpoints lack them, and a resume without them must be allowed. Keep many small "
                "objects as an array or a tensor, or save what changes in state_dict and "
                "load_state_dict of a plugin",
                stacklevel=1,
            )

    def state_dict(self, *, only_changes: bool = True) -> dict[str, Any]:
        """Returns what has changed since the objects were built.

        Args:
            only_changes: False for all that can be saved, changed or not.

        Returns:
            `contents`: of containers, tensors, arrays and generators, by the object's path;
            `values`: of attributes and other locations, by path; `gone`: the paths of attributes
            that were deleted; `lost`: why something can't be saved, by path.
        """
        current = self._walk()
        lost: dict[str, str] = {}
        counts: dict[str, str] = {}
        # Contents first: values refer to objects in them.
        encoder = self._encoder(current)
        contents = self._encoded_contents(current, encoder, lost, counts, only_changes)
        values = self._encoded_values(current, encoder, lost, only_changes)
        self._note_changes_beyond(current, lost, counts)
        if not self._needs_all:
            lost = counts
        for path in self._iterators_in(current):
            lost[path] = (
                "it is an iterator whose position Python doesn't show; keep an index or an "
                "itertools.count in its place"
            )
        self.lost = lost if only_changes else {}
        self._has_saved |= only_changes
        gone = self._deleted_attributes(current)
        return {"contents": contents, "values": values, "gone": gone, "lost": dict(self.lost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into the objects as they are.

        Warns of locations that don't exist, or have an object of another kind or shape.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError, AttributeError: no run has saved this.
        """
        locations = self._walk().locations
        decoder = Decoder(self._objects, self._device, self._classes)
        misfits = [
            *self._load_contents(state["contents"], decoder),
            *self._load_values(state["values"], decoder, locations),
        ]
        self._reset_other_values(locations, state["values"])
        for path in state["gone"]:
            location = locations.get(path)
            if location and location.is_deletable and _is_replaceable(location.value, None):
                location.delete()
        if misfits:
            warnings.warn(
                "the checkpoint has values that don't fit the objects of this run, and that stay as "
                f"they are built: {first_of(misfits)}. If you have changed the task or its data on purpose, "
                "the run continues with these; otherwise resume it with the task and the versions of "
                "packages that wrote the checkpoint, or start a new run in another run_dir",
                stacklevel=2,
            )

    def have_changed(self) -> bool:
        """Returns whether anything but the states of generators differs from when it was built."""
        state = self.state_dict()
        contents = [nest for nest in state["contents"].values() if nest["kind"] != "generator"]
        return bool(contents or state["values"] or state["gone"] or state["lost"])

    def unsavable_iterators(self) -> list[str]:
        """Returns the paths of iterators whose positions can't be saved."""
        return self._iterators_in(self._walk())

    def _remember(self, built: Walk) -> None:
        """Remembers the objects as they were built."""
        self._objects = built.objects  # referenced, so that no identity is used again
        self._paths = {id(value): path for path, value in built.objects.items()}
        self._classes = _classes_in(built.locations.values())
        self._locations = {
            path: BuiltLocation(
                location.value, fingerprint(location.value), location.owner, location.is_deletable
            )
            for path, location in built.locations.items()
        }
        weight_ids = self._weight_ids()
        self._weight_paths = {
            path for path, value in built.objects.items() if id(value) in weight_ids
        }
        self._beyond = self._fingerprint_beyond(built)
        self._contents = {
            path: BuiltContents(fingerprint_of_contents(value, self._paths), _shape_of(value))
            for path, value in built.objects.items()
            if has_identity(value) and path not in self._weight_paths
        }

    def _walk(self) -> Walk:
        return walk(self._roots, self._apart, self._paths)

    def _encoder(self, current: Walk) -> Encoder:
        memory = SharedMemory(current.objects.values(), self._objects.values())
        return Encoder(self._paths.get, self._classes.keys(), memory.base_of)

    def _weight_ids(self) -> set[int]:
        return set(map(id, self._weights()))

    # The steps of `state_dict`

    def _encoded_contents(
        self,
        current: Walk,
        encoder: Encoder,
        lost: dict[str, str],
        counts: dict[str, str],
        only_changes: bool,
    ) -> dict[str, Encoded]:
        """Returns the contents of built objects; those of new objects are where these are referred to."""
        contents: dict[str, Encoded] = {}
        for path, value in current.objects.items():
            built = self._contents.get(path)
            if built is None or self._objects[path] is not value:
                continue
            current_fingerprint = fingerprint_of_contents(value, self._paths)
            has_changed = built.fingerprint != current_fingerprint
            if only_changes and not has_changed and not is_generator(value):
                continue
            with _noted(lost, path):
                try:
                    nest = encoder.encode_contents(value)
                except NotSavableError:
                    many = _many_in(current_fingerprint)
                    if many is None:
                        raise
                    reason = (
                        f"it has {len(value):,} entries, and the run has changed objects in them; these "
                        f"are saved of up to {MAX_ENTRIES:,}, keep what changes in an array"
                    )
                    if many.differs_in_numbers(_many_in(built.fingerprint)):
                        counts[path] = reason
                    raise NotSavableError(reason) from None
                self._require_small(nest)
                if built.shape is not None:
                    nest["built_shape"] = list(built.shape)
                contents[path] = nest
        return contents

    def _note_changes_beyond(
        self, current: Walk, lost: dict[str, str], counts: dict[str, str]
    ) -> None:
        """Notes that objects have changed that the walk hasn't reached."""
        if not current.beyond:
            return
        beyond = self._fingerprint_beyond(current)
        if beyond != self._beyond:
            path = self._largest_part(current)
            lost[path] = (
                f"it has more than the {MAX_OBJECTS:,} objects that are looked at, and the run has "
                "changed others; keep what changes in an array"
            )
            if beyond.differs_in_numbers(self._beyond):
                counts[path] = lost[path]

    def _largest_part(self, current: Walk) -> str:
        return where_most_are(current.objects.keys()) or ", ".join(self._roots)

    def _fingerprint_beyond(self, current: Walk) -> Many:
        values = [location.value for location in current.beyond]
        return fingerprint_of_many(values, set(map(id, current.objects.values())))

    def _encoded_values(
        self, current: Walk, encoder: Encoder, lost: dict[str, str], only_changes: bool
    ) -> dict[str, Encoded]:
        values: dict[str, Encoded] = {}
        weight_ids = self._weight_ids()
        skipped_owners: set[str] = set()  # their parts don't exist in a new process
        for path, location in current.locations.items():
            value = location.value
            if location.owner in skipped_owners:
                skipped_owners.add(path)
                continue
            built = self._locations.get(path)
            if (
                only_changes
                and built is not None
                and built.value is value
                and type(value) in PLAIN_TYPES
            ):
                continue  # most locations; the rest of this loop takes ten times as long
            if path in self._weight_paths or id(value) in weight_ids or _is_irrelevant(value):
                continue
            has_changed = built is None or built.fingerprint != fingerprint(value)
            if built is not None and location.namespace is None:
                # Usually an entry: the contents of its container have the change.
                if has_changed and not _has_contents(current.objects.get(location.owner)):
                    lost[path] = (
                        "the run has replaced it in an object that can't be assigned to, such as "
                        "default arguments; change a value in it instead"
                    )
                continue
            if not has_changed and (only_changes or type(value) not in PLAIN_TYPES):
                continue
            if isinstance(value, _CODE) and (
                self._is_code_of_start(path, value)
                or _wraps_method_in_library(value, current.objects.get(location.owner))
            ):
                skipped_owners.add(path)
                continue
            with _noted(lost, path):
                self._require_restorable(location)
                if location.namespace is not None:
                    nest = encoder.encode(value)
                    self._require_small(nest)
                    values[path] = nest
            if path in lost:
                skipped_owners.add(path)
        return values

    def _deleted_attributes(self, current: Walk) -> list[str]:
        return [
            path
            for path, built in self._locations.items()
            if built.is_deletable
            and path not in current.locations
            and built.owner in current.objects
        ]

    def _iterators_in(self, current: Walk) -> list[str]:
        """Returns the paths of iterators whose positions can't be saved."""
        encoder = Encoder(lambda value: None)
        paths = []
        for path, location in current.locations.items():
            value = location.value
            if not isinstance(value, Iterator) or is_entered(value) or _is_irrelevant(value):
                continue
            if isinstance(value, io.IOBase) and not self._needs_all:
                continue  # a file that is read by index is sought before each read
            try:
                encoder.encode(value)
            except NotSavableError:
                paths.append(path)
        return paths

    def _is_code_of_start(self, path: str, code: Any) -> bool:
        """Returns whether a function was there at the first save: the start of a process puts it there."""
        if not self._has_saved:
            self._code_of_start[path] = code
        return self._code_of_start.get(path) is code

    def _require_restorable(self, location: Location) -> None:
        """Raises NotSavableError unless the location exists in a new process, or is an attribute."""
        is_cell = location.namespace is not None and not location.is_deletable
        if is_cell and location.path not in self._locations:
            raise NotSavableError(
                "it belongs to a function that the run has made; make the function in the task"
            )

    def _require_small(self, nest: Encoded) -> None:
        if (num_bytes := _num_bytes(nest)) > self._max_bytes:
            size = num_bytes / 1024**2
            limit = self._max_bytes / 1024**2
            raise NotSavableError(f"it has {size:,.1f} MiB, and at most {limit:,.0f} are saved")

    # The steps of `load_state_dict`

    def _load_contents(self, contents: Mapping[str, Encoded], decoder: Decoder) -> Iterator[str]:
        """Restores the contents of objects; yields what doesn't fit."""
        for path, nest in contents.items():
            target = self._objects.get(path)
            if (reason := self._misfit(path, nest, target)) is not None:
                yield f"{path} {reason}"
            else:
                decoder.decode_contents(nest, target)

    def _misfit(self, path: str, nest: Encoded, target: Any) -> str | None:
        """Returns why an object can't take saved contents; None if it can."""
        if target is None or (path not in self._contents and not is_generator(target)):
            return "isn't there"
        if not has_identity(target):
            return f"is {a(full_name(type(target)))}"
        shape = nest.get("built_shape")
        if shape is not None and tuple(shape) != tuple(target.shape):
            return f"has the shape {tuple(target.shape)}, and had {tuple(shape)} in the saved run"
        return None

    def _load_values(
        self, values: Mapping[str, Encoded], decoder: Decoder, locations: Mapping[str, Location]
    ) -> Iterator[str]:
        """Assigns values; yields what doesn't fit."""
        for path, nest in values.items():
            location = locations.get(path) or self._new_location(path)
            if location is None:
                yield f"{path} isn't there"
                continue
            value = decoder.decode(nest, location.value)
            if location.namespace is None or not _is_replaceable(location.value, value):
                yield f"{path} is {a(full_name(type(location.value)))}"
            else:
                location.assign(value)

    def _new_location(self, path: str) -> Location | None:
        """Returns the location of an attribute that the run has added to an object of the task."""
        owner_path, _, name = path.rpartition(".")
        owner = self._objects.get(owner_path)
        if isinstance(owner, type):
            is_allowed = is_class_attribute(owner, name)
            return class_attribute_location(owner, name, owner_path) if is_allowed else None
        if owner is None or not is_attribute(owner, name):
            return None
        return attribute_location(owner, name, owner_path)

    def _reset_other_values(
        self, locations: Mapping[str, Location], values: Mapping[str, Encoded]
    ) -> None:
        """Resets values that this process has changed and the saved run had not.

        A data set that is told its epoch before its state is loaded may count that, or swap two tensors.
        """
        weight_ids = self._weight_ids()
        for path, location in locations.items():
            built = self._locations.get(path)
            if built is None or path in values or location.namespace is None:
                continue
            if path in self._weight_paths or id(location.value) in weight_ids:
                continue  # another part of the checkpoint has restored it
            if not _is_value(built.value) or not _is_value(location.value):
                continue  # code that the start of a process puts there, handles, the user's objects
            if built.fingerprint != fingerprint(location.value):
                location.assign(built.value)


@contextmanager
def restored_objects(**roots: Any) -> Iterator[None]:
    """Restores objects after a block to what they were before it, as far as that can be saved."""
    objects = TrackedObjects(roots, is_run_state=False)
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


def _classes_in(locations: Iterable[Location]) -> dict[str, type]:
    """Returns the enums and named tuples that objects use, by name."""
    classes: dict[str, type] = {}
    waiting = [(location.value, 0) for location in locations]
    while waiting:
        value, depth = waiting.pop()
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, Enum) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            classes[class_name(kind)] = kind
        if type(value) in CONTAINER_TYPES and depth < MAX_NESTING and len(value) <= MAX_ENTRIES:
            entries = [*value, *value.values()] if isinstance(value, dict) else [*value]
            waiting += [(entry, depth + 1) for entry in entries if type(entry) not in PLAIN_TYPES]
    return classes


def _many_in(fingerprint: Any) -> Many | None:
    """Returns the part of a fingerprint of contents that is about objects which aren't entered."""
    last = fingerprint[-1] if isinstance(fingerprint, tuple) and fingerprint else None
    return last if isinstance(last, Many) else None


def _shape_of(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Tensor):
        return tuple(value.shape) if is_plain_tensor(value) else None
    return tuple(value.shape) if hasattr(type(value), "shape") else None


def _num_bytes(nest: Encoded) -> int:
    if isinstance(nest, Tensor):
        return nest.nbytes
    if isinstance(nest, Mapping):
        return sum(map(_num_bytes, nest.values()))
    if isinstance(nest, (list, tuple)):
        return sum(map(_num_bytes, nest))
    return len(nest) if isinstance(nest, (str, bytes)) else 8


def _is_value(value: Any) -> bool:
    kind = type(value)
    return kind in PLAIN_TYPES | TORCH_VALUES or kind in (tuple, frozenset) or has_identity(value)


def _is_irrelevant(value: Any) -> bool:
    """Returns whether training can't depend on an object: a log, a lock, a thread, a file to write."""
    if type(value) in _IO_TYPES:
        return bool(value.closed) or not value.readable()
    if isinstance(value, _HANDLES):
        return True
    # A module may refer to objects of a trainer, which are made at each start. The tensors of the pretend
    # accelerator have a class of its own.
    module_name: object = type(value).__module__  # a descriptor, for functions of C
    if not isinstance(module_name, str) or not is_of_trainer(module_name):
        return False
    return not is_entered(value) and not has_identity(value)


def _wraps_method_in_library(code: Any, owner: Any) -> bool:
    """Returns whether a library has wrapped a method of an object, which does what it did.

    A scheduler of torch wraps the `step` of its optimizer, also one that is made in the run.
    """
    function = getattr(code, "__func__", code)
    if not isinstance(function, types.FunctionType):
        return False
    wrapped = getattr(function, "__wrapped__", None)
    method = inspect.getattr_static(type(owner), getattr(wrapped, "__name__", ""), None)
    is_wrapped = wrapped is not None and inspect.unwrap(function) is inspect.unwrap(method)
    return is_wrapped and not is_own_code(function.__globals__.get("__name__"))


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
