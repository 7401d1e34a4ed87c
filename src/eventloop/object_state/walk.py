"""A walk over the places of an object graph: attributes, slots, cells, entries, class attributes, globals.

The walk reads `__dict__` and slots directly, so that no property, `__getattr__` or other code of the
objects runs. Code is never a place that can be assigned: functions are entered for their closures
and for the globals that they use.
"""

from __future__ import annotations

import argparse
import array
import contextvars
import dis
import functools
import gc
import inspect
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eventloop.rng import is_generator, objects_of_global_generators

MAX_OBJECTS = 20_000
# A longer list of objects is data: its entries aren't entered one by one.
MAX_ENTRIES = 1_000
MAX_NESTING = 16  # of containers in containers

PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
CONTAINER_TYPES = frozenset(
    {list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter}
)
_CONTAINER_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# Classes of the standard library whose instances are nothing but their attributes; those of its
# other modules are handles of a process: threads, loggers, files.
_STDLIB_TYPES = (types.SimpleNamespace, argparse.Namespace, threading.local)
_STDLIB_MODULES = frozenset({"collections", "queue", "weakref", "fractions"})
# C code that holds one object and nothing else.
_HOLDERS: dict[type, str] = {
    types.BuiltinMethodType: "__self__",
    types.MethodWrapperType: "__self__",
    memoryview: "obj",
    functools._lru_cache_wrapper: "__wrapped__",  # what it has cached is a matter of speed
    functools.cached_property: "func",
}
# Parts of torch whose instances hold state of a run in attributes; its other classes wrap C++.
_TORCH_MODULES = ("torch.utils.data", "torch.nn", "torch.optim", "torch._dynamo.eval_frame")
_ATTRIBUTES_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
# `state` and `param_groups` among them, which a checkpoint has in its own part; the last is set by
# torch's schedulers.
_ATTRIBUTES_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {
    "_opt_called"
}
_ATTRIBUTES_OF_OPTIMIZERS_IN_ORDER = sorted(_ATTRIBUTES_OF_OPTIMIZERS)
# Caches of a torchmetrics metric, and its count of updates, which a reset sets to 0.
_ATTRIBUTES_OF_METRICS = frozenset(
    {"_cache", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_update_count"}
)
_EVENTLOOP_MODULES = ("eventloop.data", "eventloop.task")
_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PREFIX_OF_DYNAMO = "_dynamo_"  # of what torch.compile notes at a tensor
_OTHER_TRAINERS = ("accelerate", "composer", "lightning", "pytorch_lightning")
_TRAINED_OR_READ = (
    nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
    torch.utils.data.DataLoader,
)
_ATTRIBUTES_OF_LOADERS = frozenset({"_iterator"})  # workers that persist


class Location(NamedTuple):
    """A place in an object graph.

    Attributes:
        path: how a user would write it, `sampler.queue` or `stages[2].rng`; unique in a walk.
        owner: the path of the object that has the place; "" for a root.
        value: what is in the place.
        assign: puts another value there; None where the place can't be assigned.
        delete: empties the place; None likewise.
    """

    path: str
    owner: str
    value: Any
    assign: Callable[[Any], None] | None = None
    delete: Callable[[], None] | None = None


class Walk(NamedTuple):
    """The result of a walk.

    Attributes:
        places: by path, those near the roots first.
        objects: the entered objects and what else has an identity (containers, tensors, generators),
            by path.
        is_complete: whether the bound on the number of objects was kept.
    """

    places: dict[str, Location]
    objects: dict[str, Any]
    is_complete: bool


def walk(
    roots: Mapping[str, Any], apart: Collection[int] = (), names: Mapping[int, str] | None = None
) -> Walk:
    """Visits the places of objects, each object once, the nearest first.

    Args:
        roots: objects by name; names begin the paths.
        apart: identities of objects that aren't entered, unless they are roots.
        names: paths of objects by identity that they keep wherever they are found now.
    """
    names = names or {}
    places: dict[str, Location] = {}
    objects: dict[str, Any] = {}
    # A method of theirs, random.random say, leads to them; they are saved by themselves.
    seen = set(map(id, objects_of_global_generators()))
    root_ids = set(map(id, roots.values()))
    waiting = deque(Location(name, "", root) for name, root in roots.items())
    num_entered = 0
    while waiting and num_entered < MAX_OBJECTS:
        place = waiting.popleft()
        places[place.path] = place
        value = place.value
        if type(value) in PLAIN_TYPES or id(value) in seen:
            continue
        if id(value) in apart and id(value) not in root_ids:
            continue
        enters = is_entered(value)
        if enters or has_identity(value):
            seen.add(id(value))
            path = names.get(id(value), place.path)
            objects[path] = value
            if enters:
                num_entered += 1
                waiting.extend(_parts_of(value, path))
    return Walk(places, objects, not waiting)


def has_identity(value: Any) -> bool:
    """Returns whether a value can be changed in place, so that two places may share it."""
    kind = type(value)
    if kind in PLAIN_TYPES or kind in (tuple, frozenset):
        return False
    return (
        kind in CONTAINER_TYPES
        or kind in (bytearray, array.array)
        or isinstance(value, Tensor)
        or is_generator(value)
        or is_array(value)
        or is_seed_source(value)
    )


def is_array(value: Any) -> bool:
    """Returns whether a value is an array of NumPy, of any class."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_seed_source(value: Any) -> bool:
    """Returns whether a value is a bit generator of NumPy, or a sequence of seeds."""
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and isinstance(
        value, (numpy_random.BitGenerator, numpy_random.SeedSequence)
    )


def is_entered(value: Any, depth: int = 0) -> bool:
    """Returns whether an object's parts are places of their own.

    Args:
        depth: how many containers surround it.
    """
    kind: Any = type(value)
    if kind in PLAIN_TYPES or isinstance(value, (types.ModuleType, Enum)):
        return False
    if isinstance(value, Tensor):
        return kind in (Tensor, nn.Parameter) and bool(vars(value) or _hooks_of_tensor(value))
    if kind in CONTAINER_TYPES:
        return not is_value_container(value, depth)
    if isinstance(value, type):
        return is_own_code(value.__module__) and not issubclass(value, Enum)
    if is_array(value):
        return value.dtype.hasobject or bool(_attributes_of(value))
    if is_generator(value) or is_seed_source(value):
        return bool(_attributes_of(value)) and is_own_code(kind.__module__)
    if kind is types.FunctionType:
        return is_own_code(value.__module__)
    if kind in (types.BuiltinMethodType, types.MethodWrapperType):
        return not isinstance(value.__self__, (types.ModuleType, type, types.NoneType))
    if kind in (types.MethodType, functools.partial, functools.partialmethod, property):
        return True
    if kind in (types.MappingProxyType, contextvars.ContextVar) or kind in _HOLDERS:
        return True
    if isinstance(value, weakref.ref):
        return True
    return _is_entered_class(kind) and (_attributes_of(value) is not None or bool(slots_of(kind)))


def is_value_container(container: Any, depth: int = 0) -> bool:
    """Returns whether a container has no entry, at any depth, that is an object of its own."""
    if len(container) > MAX_ENTRIES or depth >= MAX_NESTING:
        return True
    entries = container.values() if isinstance(container, dict) else container
    return all(type(entry) in PLAIN_TYPES or _is_value(entry, depth + 1) for entry in entries)


def _is_value(entry: Any, depth: int) -> bool:
    if type(entry) in (tuple, frozenset):
        return is_value_container(entry, depth)
    is_scalar = type(entry).__module__ == "numpy" and type(entry).__name__ != "ndarray"
    return isinstance(entry, Enum) or (is_scalar and not is_generator(entry))


@functools.lru_cache(maxsize=4096)
def is_own_code(module_name: str | None) -> bool:
    """Returns whether a module is the user's: neither installed nor a part of Python."""
    if not isinstance(module_name, str | None):
        return False  # a class of C code may have a descriptor there
    root = (module_name or "").partition(".")[0]
    if root in sys.stdlib_module_names or root in ("torch", "eventloop"):
        return root == "__main__"
    path = getattr(sys.modules.get(module_name or ""), "__file__", None)
    if path is None:
        return True
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return False
    if any(Path(path).is_relative_to(folder) for folder in _installed_folders()):
        return False
    depth = (module_name or "").count(".") + (Path(path).name == "__init__.py")
    folders = Path(path).parents
    return not _has_distributions(folders[min(depth, len(folders) - 1)])


@functools.cache
def _installed_folders() -> frozenset[str]:
    named = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return frozenset({*named, *site.getsitepackages(), site.getusersitepackages()})


@functools.lru_cache(maxsize=256)
def _has_distributions(folder: Path) -> bool:
    """Returns whether packages are installed into a folder, by `pip install --target` say."""
    return next(folder.glob("*.dist-info"), None) is not None


@functools.lru_cache(maxsize=4096)
def _is_entered_class(kind: Any) -> bool:
    if kind in _STDLIB_TYPES or issubclass(kind, _STDLIB_TYPES):
        return True
    module_name: str = kind.__module__
    root = module_name.partition(".")[0]
    if root == "torch":
        return module_name.startswith(_TORCH_MODULES)
    if root == "eventloop":  # the loop's own objects save their state by themselves
        return module_name.startswith(_EVENTLOOP_MODULES)
    if root in _STDLIB_MODULES:
        return True
    if is_of_trainer(module_name):
        return issubclass(kind, _TRAINED_OR_READ)
    return root == "__main__" or root not in (*sys.stdlib_module_names, "numpy")


def is_of_trainer(module_name: str) -> bool:
    """Returns whether a module belongs to a plugin's package or to another trainer.

    Of their objects only those are entered that a run trains or reads: the others save their state by
    themselves, or are made at each start.
    """
    root = module_name.partition(".")[0]
    return root.startswith("eventloop") or root in _OTHER_TRAINERS


# The parts of an object


def _parts_of(whole: Any, path: str) -> Iterator[Location]:
    """Yields the places of an entered object."""
    kind = type(whole)
    if kind in CONTAINER_TYPES:
        yield from _entries_of(whole, path)
    elif isinstance(whole, type):
        yield from _class_places(whole, path)
    elif kind is types.FunctionType:
        yield from _cells_of(whole, path)
        yield from _globals_of(whole, path)
    elif kind is types.MethodType:
        yield Location(f"{path}.__self__", path, whole.__self__)
        yield Location(f"{path}.__func__", path, whole.__func__)
    elif kind in _HOLDERS:
        name = _HOLDERS[kind]
        yield Location(f"{path}.{name}", path, getattr(whole, name))
    elif kind is types.MappingProxyType:
        yield Location(f"{path}.<mapping>", path, gc.get_referents(whole)[0])
    elif isinstance(whole, weakref.ref):
        yield Location(f"{path}()", path, weakref.ref.__call__(whole))
    elif kind is contextvars.ContextVar:
        yield Location(f"{path}.get()", path, whole.get(None), whole.set)
    elif kind is property:
        for name in ("fget", "fset", "fdel"):
            yield Location(f"{path}.{name}", path, getattr(whole, name))
    elif isinstance(whole, Tensor):
        yield from _attribute_locations(whole, path)
        yield from _hooks_of_tensor(whole, path)
    elif is_array(whole) and whole.dtype.hasobject:
        for idx, entry in enumerate(whole.flat if whole.size <= MAX_ENTRIES else ()):
            yield Location(f"{path}[{idx}]", path, entry)
    elif kind in (functools.partial, functools.partialmethod):
        yield Location(f"{path}.func", path, whole.func)
        yield Location(f"{path}.args", path, whole.args)
        yield Location(f"{path}.keywords", path, whole.keywords)
    else:
        if isinstance(whole, nn.Module):
            yield from _parts_of_module(whole, path)
        else:
            yield from _attribute_locations(whole, path)
        if (contents := contents_of(whole)) is not None:
            yield contents._replace(path=f"{path}[:]", owner=path)
        for base in kind.__mro__:
            if is_own_code(base.__module__):
                yield Location(f"{base.__module__}:{base.__qualname__}", path, base)


def _hooks_of_tensor(tensor: Tensor, path: str = "") -> list[Location]:
    """Returns the places of functions that are called with a tensor's gradient."""
    hooks = []
    for name in _HOOKS_OF_TENSORS:
        for idx, hook in enumerate((getattr(tensor, name, None) or {}).values()):
            hooks.append(Location(f"{path}.{name}[{idx}]", path, hook))
    return hooks


def _hooks_in(
    attributes: Mapping[str, Any], names: Collection[str], path: str
) -> Iterator[Location]:
    """Yields the functions in the hook registries of a module or an optimizer."""
    for name in names:
        registry = attributes.get(name)
        if isinstance(registry, dict) and "hook" in name:
            for idx, hook in enumerate(registry.values()):
                yield Location(f"{path}.{name}[{idx}]", path, hook)


def _entries_of(container: Any, path: str) -> Iterator[Location]:
    """Yields the entries of a container; the container's own place has their order and number."""
    if isinstance(container, dict):
        for key, value in container.items():
            yield Location(f"{path}[{_shown_key(key)}]", path, value)
    else:
        for idx, value in enumerate(container):
            yield Location(f"{path}[{idx}]", path, value)


def contents_of(container: Any) -> Location | None:
    """Returns the contents of an instance of a subclass of a container, as a built-in container."""
    for base in _CONTAINER_BASES:
        if isinstance(container, base):
            entries = base.items(container) if issubclass(base, dict) else base.__iter__(container)
            return Location("", "", base(entries), functools.partial(refill, container, base))
    return None


def refill(container: Any, base: Any, contents: Any) -> None:
    """Replaces the contents of a mutable container, by the methods of its built-in base class."""
    base.clear(container)
    if issubclass(base, (dict, set)):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def _shown_key(key: Any) -> str:
    return repr(key) if type(key) in PLAIN_TYPES else f"a {type(key).__name__}"


def _attribute_locations(
    whole: Any, path: str, skipped: Collection[str] = ()
) -> Iterator[Location]:
    skipped = {*skipped, *_skipped_attributes(whole)}
    attributes = _attributes_of(whole)
    for name, value in (attributes or {}).items():
        if name.startswith(_PREFIX_OF_DYNAMO):
            continue
        if name not in skipped and not _is_dunder(name):
            yield attribute_location(whole, name, path, value)
    if isinstance(whole, torch.optim.Optimizer):
        yield from _hooks_in(attributes or {}, _ATTRIBUTES_OF_OPTIMIZERS_IN_ORDER, path)
    for name, member in _slots_of_instance(whole).items():
        try:
            value = member.__get__(whole)
        except AttributeError:  # an empty slot
            continue
        yield attribute_location(whole, name, path, value)


def attribute_location(whole: Any, name: str, path: str, value: Any = None) -> Location:
    """Returns the place of an instance attribute or slot, which may not exist yet."""
    member = _slots_of_instance(whole).get(name)
    if member is not None:
        assign = functools.partial(member.__set__, whole)
        delete = functools.partial(member.__delete__, whole)
    else:
        attributes = _attributes_of(whole)
        assert attributes is not None
        assign = functools.partial(attributes.__setitem__, name)
        delete = functools.partial(attributes.pop, name, None)
    return Location(f"{path}.{name}", path, value, assign, delete)


def is_attribute(whole: Any, name: str) -> bool:
    """Returns whether an instance may have a data attribute of this name, which would hide no code."""
    if name in _slots_of_instance(whole):
        return True
    if not name.isidentifier() or _is_dunder(name) or _attributes_of(whole) is None:
        return False
    of_class = inspect.getattr_static(type(whole), name, None)
    if isinstance(of_class, functools.cached_property):
        return True
    return not callable(of_class) and not hasattr(type(of_class), "__get__")


def _skipped_attributes(whole: Any) -> Collection[str]:
    if isinstance(whole, torch.optim.Optimizer):
        return _ATTRIBUTES_OF_OPTIMIZERS
    if isinstance(whole, torch.utils.data.DataLoader):
        return _ATTRIBUTES_OF_LOADERS
    return ()


def _parts_of_module(module: nn.Module, path: str) -> Iterator[Location]:
    """Yields what a module's `state_dict` leaves out, and its submodules."""
    is_compiled = type(module).__name__ == "OptimizedModule"
    if not is_compiled:
        state_names = getattr(module, "_defaults", ())  # the state of a torchmetrics metric
        skipped = {*_ATTRIBUTES_OF_MODULES, *_ATTRIBUTES_OF_METRICS, *state_names}
        yield from _attribute_locations(module, path, skipped)
        for name, buffer in module._buffers.items():
            assign = functools.partial(module._buffers.__setitem__, name)
            yield Location(f"{path}.{name}", path, buffer, assign)
        for name, parameter in module._parameters.items():
            yield Location(f"{path}.{name}", path, parameter)
    yield from _hooks_in(vars(module), sorted(_ATTRIBUTES_OF_MODULES), path)
    for name, submodule in module._modules.items():
        if submodule is not None:
            # A compiled module has the paths of the plain one.
            yield Location(path if is_compiled else f"{path}.{name}", path, submodule)


def _cells_of(function: types.FunctionType, path: str) -> Iterator[Location]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        assign = functools.partial(setattr, cell, "cell_contents")
        yield Location(f"{path}.<{name}>", path, value, assign)
    for name, value in vars(function).items():
        if not _is_dunder(name):
            assign = functools.partial(vars(function).__setitem__, name)
            yield Location(f"{path}.{name}", path, value, assign)
    for idx, value in enumerate(function.__defaults__ or ()):
        yield Location(f"{path}.<default {idx}>", path, value)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Location(f"{path}.<default {name}>", path, value)


def _class_places(kind: type, path: str) -> Iterator[Location]:
    """Yields the attributes of a user's class, and the globals that its methods use."""
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType):
            yield from _cells_of(function, f"{path}.{name}")
            yield from _globals_of(function, path)
        elif hasattr(type(value), "__get__"):
            if not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                yield Location(f"{path}.{name}", path, value)
        elif not _is_dunder(name):
            yield class_attribute_location(kind, name, path, value)
    if is_own_code(type(kind).__module__):
        metaclass = type(kind)
        yield Location(f"{metaclass.__module__}:{metaclass.__qualname__}", path, metaclass)


def class_attribute_location(kind: type, name: str, path: str, value: Any = None) -> Location:
    """Returns the place of an attribute of a class, which may not exist yet."""
    assign = functools.partial(type.__setattr__, kind, name)
    delete = functools.partial(type.__delattr__, kind, name)
    return Location(f"{path}.{name}", path, value, assign, delete)


def _globals_of(function: types.FunctionType, path: str) -> Iterator[Location]:
    """Yields the module-level variables that a function of the user's reads or writes."""
    namespace = function.__globals__
    for name in _names_of_globals(function.__code__):
        if name in namespace:
            assign = functools.partial(namespace.__setitem__, name)
            yield Location(f"{function.__module__}:{name}", path, namespace[name], assign)


@functools.lru_cache(maxsize=4096)
def _names_of_globals(code: types.CodeType) -> frozenset[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names.union(*map(_names_of_globals, inner)))


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _attributes_of(value: Any) -> dict[str, Any] | None:
    read = threading.local if isinstance(value, threading.local) else object
    try:
        attributes = read.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _slots_of_instance(whole: Any) -> dict[str, types.MemberDescriptorType]:
    kind: Any = type(whole)
    return slots_of(kind)


@functools.lru_cache(maxsize=4096)
def slots_of(kind: Any) -> dict[str, types.MemberDescriptorType]:
    """Returns the descriptors of `__slots__` by name, those of base classes among them."""
    members: dict[str, types.MemberDescriptorType] = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    # A class may have a slot that hides the one of its base class.
                    is_hidden = name in members
                    members[f"{base.__name__}::{name}" if is_hidden else name] = member
    return members
