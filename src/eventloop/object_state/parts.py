"""The parts of an object: attributes, slots, entries, closures' cells, hooks, and globals of functions.

Only data can be assigned. Functions are entered for their closures and for the globals that they use.
"""

from __future__ import annotations

import contextvars
import dis
import functools
import gc
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from eventloop.object_state.attributes import (
    AssigningNamespace,
    Location,
    attributes_in,
    class_attribute_location,
    is_dunder,
)
from eventloop.object_state.entering import (
    CONTAINER_TYPES,
    HELD_ATTRIBUTES,
    HOOKS_OF_TENSORS,
    MAX_ENTRIES,
    PLAIN_TYPES,
    is_array,
    is_own_code,
)

_CONTAINER_BASES: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
# One that `torch.compile` sets later is annotated in the class, as `forward` is, which a run may replace.
_ATTRIBUTES_OF_MODULES = frozenset({*vars(nn.Module()), *nn.Module.__annotations__}) - {
    "training",
    "forward",
}
# Caches of a torchmetrics metric, and its count of updates, which a reset sets to 0.
_ATTRIBUTES_OF_METRICS = frozenset(
    {"_cache", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_update_count"}
)
_ATTRIBUTES_OF_LOADERS = frozenset({"_iterator"})  # persistent workers


@functools.cache
def _attributes_of_optimizers() -> frozenset[str]:
    """Returns the attributes that torch gives an optimizer.

    Including `state` and `param_groups`, which another part of a checkpoint has. torch's schedulers set
    `_opt_called`.
    """
    # Not when this module is imported: torch's first optimizer imports its compiler, which takes seconds.
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called"}


def locations_in(whole: Any, path: str) -> Iterator[Location]:
    """Returns the locations in an object that is entered."""
    kind = type(whole)
    if kind in CONTAINER_TYPES:
        return _entries(whole, path)
    if isinstance(whole, type):
        return _parts_of_class(whole, path)
    if kind is types.FunctionType:
        return _parts_of_function(whole, path)
    if isinstance(whole, Tensor):
        return _parts_of_tensor(whole, path)
    if is_array(whole) and whole.dtype.hasobject:
        entries = whole.flat if whole.size <= MAX_ENTRIES else ()
        return _entries(entries, path)
    if kind in HELD_ATTRIBUTES:
        names = HELD_ATTRIBUTES[kind]
        return (Location(f"{path}.{name}", path, getattr(whole, name)) for name in names)
    if kind is types.MappingProxyType:
        return iter([Location(f"{path}.<mapping>", path, gc.get_referents(whole)[0])])
    if isinstance(whole, weakref.ref):
        return iter([Location(f"{path}()", path, weakref.ref.__call__(whole))])
    if kind is contextvars.ContextVar:
        namespace = AssigningNamespace(whole.set)
        return iter([Location(f"{path}.get()", path, whole.get(None), namespace)])
    return _parts_of_instance(whole, path)


def refill(container: Any, base: Any, contents: Any) -> None:
    """Replaces the contents of a mutable container, by the methods of its built-in base class."""
    base.clear(container)
    if issubclass(base, (dict, set)):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def _entries(container: Any, path: str) -> Iterator[Location]:
    """Yields the entries of a container; their order and number are its own state."""
    if isinstance(container, dict):
        for idx, (key, value) in enumerate(container.items()):
            yield Location(f"{path}[{_label_of(key, idx)}]", path, value)
    else:
        for idx, value in enumerate(container):
            yield Location(f"{path}[{idx}]", path, value)


def _label_of(key: Any, idx: int) -> str:
    """Returns how a key is written in a path; keys of classes with code of their own, by position."""
    if type(key) in PLAIN_TYPES:
        return repr(key)
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key._name_}"
    if type(key) is tuple and all(type(entry) in PLAIN_TYPES for entry in key):
        return repr(key)
    return f"key {idx}, a {type(key).__name__}"


def _parts_of_instance(whole: Any, path: str) -> Iterator[Location]:
    if isinstance(whole, nn.Module):
        yield from _parts_of_module(whole, path)
    elif isinstance(whole, torch.optim.Optimizer):
        yield from attributes_in(whole, path, _attributes_of_optimizers())
        yield from _hooks(whole, path, _attributes_of_optimizers())
    elif isinstance(whole, torch.utils.data.DataLoader):
        yield from attributes_in(whole, path, _ATTRIBUTES_OF_LOADERS)
    else:
        yield from attributes_in(whole, path)
    yield from _contents(whole, path)
    for base in type(whole).__mro__:
        if is_own_code(base.__module__):
            yield _class_location(base, path)


def _contents(whole: Any, path: str) -> Iterator[Location]:
    """Yields the contents of an instance of a subclass of a container, as a built-in container."""
    for base in _CONTAINER_BASES:
        if isinstance(whole, base):
            entries = base.items(whole) if issubclass(base, dict) else base.__iter__(whole)
            namespace = AssigningNamespace(functools.partial(refill, whole, base))
            yield Location(f"{path}[:]", path, base(entries), namespace)
            return


def _parts_of_module(module: nn.Module, path: str) -> Iterator[Location]:
    """Yields the state that `state_dict` leaves out, tensors, hooks and submodules."""
    is_compiled = type(module).__name__ == "OptimizedModule"
    if not is_compiled:
        state_names = getattr(module, "_defaults", ())  # the state of a torchmetrics metric
        skipped = {*_ATTRIBUTES_OF_MODULES, *_ATTRIBUTES_OF_METRICS, *state_names}
        yield from attributes_in(module, path, skipped)
        for name, buffer in module._buffers.items():
            yield Location(f"{path}.{name}", path, buffer, module._buffers, name)
        for name, parameter in module._parameters.items():
            yield Location(f"{path}.{name}", path, parameter)
    yield from _hooks(module, path, _ATTRIBUTES_OF_MODULES)
    for name, submodule in module._modules.items():
        if submodule is not None:
            # A compiled module has the paths of the plain module.
            yield Location(path if is_compiled else f"{path}.{name}", path, submodule)


def _hooks(whole: Any, path: str, names: Collection[str]) -> Iterator[Location]:
    """Yields the functions that are registered at a module or an optimizer, and called in training."""
    for name in sorted(names):
        registry = vars(whole).get(name)
        # FSDP2 registers those of `state_dict` with the first batch.
        is_for_training = "hook" in name and "state_dict" not in name
        if isinstance(registry, dict) and is_for_training:
            yield from _numbered(registry, f"{path}.{name}", path)


def _parts_of_tensor(tensor: Tensor, path: str) -> Iterator[Location]:
    yield from attributes_in(tensor, path)
    for name in HOOKS_OF_TENSORS:
        yield from _numbered(getattr(tensor, name, None) or {}, f"{path}.{name}", path)


def _numbered(registry: Mapping[Any, Any], path: str, owner: str) -> Iterator[Location]:
    """Yields hooks by their order: the keys count up in the whole process."""
    for idx, hook in enumerate(registry.values()):
        yield Location(f"{path}[{idx}]", owner, hook)


def _parts_of_function(function: types.FunctionType, path: str) -> Iterator[Location]:
    yield from _closure(function, path)
    yield from _globals(function, path)


def _closure(function: types.FunctionType, path: str) -> Iterator[Location]:
    """Yields cells, attributes and default arguments of a function."""
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        namespace = AssigningNamespace(functools.partial(setattr, cell, "cell_contents"))
        yield Location(f"{path}.<{name}>", path, value, namespace)
    for name, value in vars(function).items():
        if not is_dunder(name):
            yield Location(f"{path}.{name}", path, value, vars(function), name)
    for idx, value in enumerate(function.__defaults__ or ()):
        yield Location(f"{path}.<default {idx}>", path, value)
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Location(f"{path}.<default {name}>", path, value)


def _globals(function: types.FunctionType, path: str) -> Iterator[Location]:
    """Yields the module-level variables that a user's function reads or writes."""
    namespace = function.__globals__
    for name in _names_of_globals(function.__code__):
        if name in namespace:
            variable = f"{function.__module__}:{name}"
            yield Location(variable, path, namespace[name], namespace, name)


@functools.lru_cache(maxsize=4096)
def _names_of_globals(code: types.CodeType) -> frozenset[str]:
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names.union(*map(_names_of_globals, inner)))


def _parts_of_class(kind: type, path: str) -> Iterator[Location]:
    """Yields the attributes of a user's class, and the globals that its methods use."""
    for name, value in vars(kind).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if isinstance(function, types.FunctionType):
            yield from _closure(function, f"{path}.{name}")
            yield from _globals(function, path)
        elif hasattr(type(value), "__get__"):
            if not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                yield Location(f"{path}.{name}", path, value)
        elif not is_dunder(name):
            yield class_attribute_location(kind, name, path, value)
    if is_own_code(type(kind).__module__):
        yield _class_location(type(kind), path)


def _class_location(kind: type, owner: str) -> Location:
    return Location(f"{kind.__module__}:{kind.__qualname__}", owner, kind)
