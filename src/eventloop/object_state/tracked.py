"""Saves and restores the changes of objects since a run was built.

When a run is resumed, the task builds its objects again. So a checkpoint only needs the changes since they
were built, and the states of random generators. Values are restored into the objects that the task has
built. An object that was created during the run can't be restored; it is reported instead.
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

# Objects that belong to a process. A resumed run creates them again when it needs them.
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
    """A location when the run was built.

    Attributes:
        value: the value at that time; the reference keeps its id from being used again.
        fingerprint: the fingerprint of the value.
        owner: the path of the object that holds the value.
        is_deletable: whether the location is an attribute that can be deleted.
    """

    value: Any
    fingerprint: Any
    owner: str
    is_deletable: bool


class BuiltContents(NamedTuple):
    """The contents of an object when the run was built.

    Attributes:
        fingerprint: the fingerprint of the contents.
        shape: the shape of a tensor or an array; None for other objects.
    """

    fingerprint: Any
    shape: tuple[int, ...] | None


class TrackedObjects:
    """The state of objects without a `state_dict`, or whose `state_dict` is incomplete.

    Args:
        roots: the objects by name, right after they were built.
        excluded: objects whose state is saved elsewhere; they aren't entered.
        weights: returns the tensors whose values are saved elsewhere.
        device: the device for tensors in a checkpoint that weren't on the host.
        needs_all: whether every change must be saved. If not, because the objects are read by index,
            only iterators and numbers count: other values that can't be saved are files or caches.
        max_bytes: the maximum size of a saved value.
        is_run_state: whether the state is saved in checkpoints, so that a warning about missing
            objects is needed.

    Attributes:
        lost: reasons why values are missing in the latest state, by the path of the location.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        excluded: Iterable[Any] = (),
        weights: Callable[[], Iterable[Tensor]] = tuple,
        device: torch.device | None = None,
        *,
        needs_all: bool = True,
        max_bytes: int = MAX_BYTES,
        is_run_state: bool = True,
    ) -> None:
        self._roots = dict(roots)
        # The references keep the ids from being used again.
        self._excluded = {id(value): value for value in excluded}
        self._weights = weights
        self._needs_all = needs_all
        self._max_bytes = max_bytes
        self._device = device or torch.device("cpu")
        self._code_of_start: dict[str, Any] = {}
        self._has_saved = False
        self.lost: dict[str, str] = {}
        built = walk(self._roots, self._excluded)
        self._remember(built)
        if built.beyond and is_run_state:
            warnings.warn(
                f"only the first {MAX_OBJECTS:,} objects of {', '.join(self._roots)} are checked for changes; "
                f"most of them are in {self._largest_part(built)}. If the run changes other objects, "
                "checkpoints lack these changes, and a resume without them must be allowed. Store many "
                "small objects as an array or a tensor, or save changes in state_dict and "
                "load_state_dict of a plugin",
                stacklevel=1,
            )

    def state_dict(self, *, only_changes: bool = True) -> dict[str, Any]:
        """Returns the changes since the objects were built.

        Args:
            only_changes: False to return everything that can be saved, changed or not.

        Returns:
            `contents`: the contents of containers, tensors, arrays and generators, by the object's path;
            `values`: the values of attributes and other locations, by path; `gone`: the paths of
            deleted attributes; `lost`: reasons why a change can't be saved, by path.
        """
        current = self._walk()
        lost: dict[str, str] = {}
        lost_numbers: dict[str, str] = {}
        # Contents first, since values refer to objects in them.
        encoder = self._encoder(current)
        contents = self._encoded_contents(current, encoder, lost, lost_numbers, only_changes)
        values = self._encoded_values(current, encoder, lost, only_changes)
        self._note_changes_beyond(current, lost, lost_numbers)
        if not self._needs_all:
            lost = lost_numbers
        for path in self._iterators_in(current):
            lost[path] = (
                "it is an iterator whose position can't be read; use an index or an itertools.count "
                "instead"
            )
        self.lost = lost if only_changes else {}
        self._has_saved |= only_changes
        gone = self._deleted_attributes(current)
        return {"contents": contents, "values": values, "gone": gone, "lost": dict(self.lost)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict` into the existing objects.

        Warns about locations that don't exist, or whose object has another type or shape.

        Raises:
            LookupError, TypeError, ValueError, RuntimeError, AttributeError: the state is invalid.
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
                "the checkpoint has values that don't fit the objects of this run, which keep their "
                f"initial values: {first_of(misfits)}. If you have changed the task or its data on purpose, "
                "no action is needed; otherwise resume the run with the task and the package versions "
                "that wrote the checkpoint, or start a new run in another run_dir",
                stacklevel=2,
            )

    def have_changed(self) -> bool:
        """Returns whether anything except the states of generators has changed since the start."""
        state = self.state_dict()
        contents = [nest for nest in state["contents"].values() if nest["kind"] != "generator"]
        return bool(contents or state["values"] or state["gone"] or state["lost"])

    def unsavable_iterators(self) -> list[str]:
        """Returns the paths of iterators whose positions can't be saved."""
        return self._iterators_in(self._walk())

    def _remember(self, built: Walk) -> None:
        """Records the state of the objects right after they were built."""
        self._objects = built.objects  # the references keep the ids from being used again
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
        return walk(self._roots, self._excluded, self._paths)

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
        lost_numbers: dict[str, str],
        only_changes: bool,
    ) -> dict[str, Encoded]:
        """Returns the contents of built objects.

        The contents of objects that were created later are encoded where they are referred to.
        """
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
                    objects = _objects_in(current_fingerprint)
                    if objects is None:
                        raise
                    reason = (
                        f"it has {len(value):,} entries, and the run has changed objects in them; such "
                        f"objects are saved only in containers with up to {MAX_ENTRIES:,} entries. "
                        "Store the changing values in an array"
                    )
                    if objects.differs_in_numbers(_objects_in(built.fingerprint)):
                        lost_numbers[path] = reason
                    raise NotSavableError(reason) from None
                self._require_small(nest)
                if built.shape is not None:
                    nest["built_shape"] = list(built.shape)
                contents[path] = nest
        return contents

    def _note_changes_beyond(
        self, current: Walk, lost: dict[str, str], lost_numbers: dict[str, str]
    ) -> None:
        """Adds a reason to `lost` if objects have changed that the walk hasn't reached."""
        if not current.beyond:
            return
        beyond = self._fingerprint_beyond(current)
        if beyond != self._beyond:
            path = self._largest_part(current)
            lost[path] = (
                f"only {MAX_OBJECTS:,} objects in it are checked, and the run has changed other objects; "
                "store the changing values in an array"
            )
            if beyond.differs_in_numbers(self._beyond):
                lost_numbers[path] = lost[path]

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
        # Paths of objects that don't exist in a new process, nor do the locations in them.
        skipped_owners: set[str] = set()
        for path, location in current.locations.items():
            value = location.value
            if location.owner in skipped_owners:
                skipped_owners.add(path)
                continue
            built = self._locations.get(path)
            is_identical = built is not None and built.value is value
            if only_changes and is_identical and type(value) in PLAIN_TYPES:
                continue  # most locations end here; the rest of the loop takes ten times as long
            if path in self._weight_paths or id(value) in weight_ids or _is_irrelevant(value):
                continue
            has_changed = built is None or built.fingerprint != fingerprint(value)
            if built is not None and location.namespace is None:
                # Usually an entry of a container, whose contents include the change.
                if has_changed and not _has_contents(current.objects.get(location.owner)):
                    lost[path] = (
                        "the run has replaced it where values can't be assigned, for example in "
                        "default arguments; change the value in place instead"
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
            if type(value) in PLAIN_TYPES or not isinstance(value, Iterator):
                continue
            if is_entered(value) or _is_irrelevant(value):
                continue
            if isinstance(value, io.IOBase) and not self._needs_all:
                continue  # a file that is read by index is sought before each read
            try:
                encoder.encode(value)
            except NotSavableError:
                paths.append(path)
        return paths

    def _is_code_of_start(self, path: str, code: Any) -> bool:
        """Returns whether a function existed at the first save, so every process creates it at its start."""
        if not self._has_saved:
            self._code_of_start[path] = code
        return self._code_of_start.get(path) is code

    def _require_restorable(self, location: Location) -> None:
        """Raises NotSavableError for a cell of a closure that doesn't exist in a new process."""
        is_cell = location.namespace is not None and not location.is_deletable
        if is_cell and location.path not in self._locations:
            raise NotSavableError(
                "it belongs to a function that was created during the run; create the function in the task"
            )

    def _require_small(self, nest: Encoded) -> None:
        num_bytes = _num_bytes(nest)
        if num_bytes > self._max_bytes:
            size = num_bytes / 1024**2
            limit = self._max_bytes / 1024**2
            raise NotSavableError(f"it has {size:,.1f} MiB, and at most {limit:,.0f} are saved")

    # The steps of `load_state_dict`

    def _load_contents(self, contents: Mapping[str, Encoded], decoder: Decoder) -> Iterator[str]:
        """Restores the contents of objects; yields a description of each object that doesn't fit."""
        for path, nest in contents.items():
            target = self._objects.get(path)
            reason = self._misfit(path, nest, target)
            if reason is not None:
                yield f"{path} {reason}"
            else:
                decoder.decode_contents(nest, target)

    def _misfit(self, path: str, nest: Encoded, target: Any) -> str | None:
        """Returns the reason why saved contents don't fit an object; None if they do."""
        if target is None or (path not in self._contents and not is_generator(target)):
            return "doesn't exist"
        if not has_identity(target):
            return f"is {a(full_name(type(target)))}"
        shape = nest.get("built_shape")
        if shape is not None and tuple(shape) != tuple(target.shape):
            return f"has the shape {tuple(target.shape)}, and had {tuple(shape)} in the saved run"
        return None

    def _load_values(
        self, values: Mapping[str, Encoded], decoder: Decoder, locations: Mapping[str, Location]
    ) -> Iterator[str]:
        """Assigns values; yields a description of each location that doesn't fit."""
        for path, nest in values.items():
            location = locations.get(path) or self._new_location(path)
            if location is None:
                yield f"{path} doesn't exist"
                continue
            value = decoder.decode(nest, location.value)
            if location.namespace is None or not _is_replaceable(location.value, value):
                yield f"{path} is {a(full_name(type(location.value)))}"
            else:
                location.assign(value)

    def _new_location(self, path: str) -> Location | None:
        """Returns the location of an attribute that the saved run has added; None if it can't exist."""
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
        """Resets values that this process has changed but the saved run hadn't.

        For example, a data set may count calls of `set_epoch`, which the loop calls before loading.
        """
        weight_ids = self._weight_ids()
        for path, location in locations.items():
            built = self._locations.get(path)
            if built is None or path in values or location.namespace is None:
                continue
            if path in self._weight_paths or id(location.value) in weight_ids:
                continue  # restored by another part of the checkpoint
            # Functions that the process sets at its start, handles and the user's objects stay.
            if not _is_value(built.value) or not _is_value(location.value):
                continue
            if built.fingerprint != fingerprint(location.value):
                location.assign(built.value)


@contextmanager
def restored_objects(**roots: Any) -> Iterator[None]:
    """Restores objects after the block to their state before it, except for state that can't be saved."""
    objects = TrackedObjects(roots, is_run_state=False)
    state = objects.state_dict(only_changes=False)
    try:
        yield
    finally:
        changed_contents = objects.state_dict()["contents"]
        contents = {
            path: nest for path, nest in state["contents"].items() if path in changed_contents
        }
        objects.load_state_dict({**state, "contents": contents})


@contextmanager
def _noted(lost: dict[str, str], path: str) -> Iterator[None]:
    """Adds the reason to `lost` if the block raises NotSavableError."""
    try:
        yield
    except NotSavableError as error:
        lost[path] = str(error)


def _classes_in(locations: Iterable[Location]) -> dict[str, type]:
    """Returns the enums and named tuples that the locations use, by name."""
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


def _objects_in(fingerprint: Any) -> Many | None:
    """Returns the last element of a fingerprint if it covers objects that aren't entered, else None."""
    if not isinstance(fingerprint, tuple) or not fingerprint:
        return None
    return fingerprint[-1] if isinstance(fingerprint[-1], Many) else None


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
    """Returns whether an object can't affect training: a log, a lock, a thread, a file for writing."""
    if type(value) in _IO_TYPES:
        return bool(value.closed) or not value.readable()
    if isinstance(value, _HANDLES):
        return True
    # A model may refer to objects of a trainer, which are created at each start. Tensors of the simulated
    # accelerator also have a class of a plugin's package, but must be saved.
    module_name: object = type(value).__module__  # for functions in C, it is a descriptor
    if not isinstance(module_name, str) or not is_of_trainer(module_name):
        return False
    return not is_entered(value) and not has_identity(value)


def _wraps_method_in_library(code: Any, owner: Any) -> bool:
    """Returns whether a function is a library's wrapper of an object's method.

    Such a wrapper needn't be saved: for example, torch's schedulers wrap `step` of their optimizer
    whenever they are created.
    """
    function = getattr(code, "__func__", code)
    if not isinstance(function, types.FunctionType):
        return False
    wrapped = getattr(function, "__wrapped__", None)
    method = inspect.getattr_static(type(owner), getattr(wrapped, "__name__", ""), None)
    is_wrapped = wrapped is not None and inspect.unwrap(function) is inspect.unwrap(method)
    return is_wrapped and not is_own_code(function.__globals__.get("__name__"))


def _has_contents(owner: Any) -> bool:
    """Returns whether an object's entries are saved with its contents, or in a `state_dict`."""
    return has_identity(owner) or isinstance(
        owner, (tuple, frozenset, torch.nn.Module, torch.optim.Optimizer)
    )


def _is_replaceable(current: Any, value: Any) -> bool:
    """Returns whether a saved value may replace the current value, which must not be code."""
    return (
        type(current) is type(value)
        or type(current) in PLAIN_TYPES | TORCH_VALUES
        or isinstance(current, (tuple, frozenset, Enum))
        or has_identity(current)
        or (
            type(current).__module__ in ("numpy", "itertools", "builtins") and not callable(current)
        )
    )
