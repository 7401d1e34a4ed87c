"""The locations in an object: attributes, slots, entries, cells of closures, hooks, globals of functions.

Only data can be assigned. Functions are entered because of their closures and the globals that they use.
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
# Annotations include attributes that `torch.compile` sets later. They also include `forward`, but a run
# may replace a module's `forward`, so it isn't skipped.
_ATTRIBUTES_OF_MODULES = frozenset({*vars(nn.Module()), *nn.Module.__annotations__}) - {
    "training",
    "forward",
}
# Caches of a torchmetrics metric, and its number of updates, which `reset` sets to 0.
_ATTRIBUTES_OF_METRICS = frozenset(
    {"_cache", "_computed", "_forward_cache", "_is_synced", "_to_sync", "_update_count"}
)
_SKIPPED_OF_MODULES = _ATTRIBUTES_OF_MODULES | _ATTRIBUTES_OF_METRICS
# FSDP2 registers hooks for `state_dict` at the first batch, which would count as a change.
_HOOKS_OF_MODULES = tuple(
    name for name in sorted(_ATTRIBUTES_OF_MODULES) if "hook" in name and "state_dict" not in name
)
_ATTRIBUTES_OF_LOADERS = frozenset({"_iterator"})  # persistent workers


@functools.cache
def _attributes_of_optimizers() -> frozenset[str]:
    """Returns the names of attributes that torch sets on every optimizer.

    They include `state` and `param_groups`, which are saved in another part of a checkpoint, and
    `_opt_called`, which torch's schedulers set.
    """
    # Not at import time: creating the first optimizer imports torch's compiler, which takes seconds.
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1))) | {"_opt_called"}


@functools.cache
def _hooks_of_optimizers() -> tuple[str, ...]:
    names = sorted(_attributes_of_optimizers())
    return tuple(name for name in names if "hook" in name and "state_dict" not in name)


def locations_in(target: Any, path: str) -> Iterator[Location]:
    """Returns the locations in an object for which `is_entered` is true."""
    kind = type(target)
    if kind in CONTAINER_TYPES:
        return _entries(target, path)
    if isinstance(target, type):
        return _parts_of_class(target, path)
    if kind is types.FunctionType:
        return _parts_of_function(target, path)
    if isinstance(target, Tensor):
        return _parts_of_tensor(target, path)
    if is_array(target) and target.dtype.hasobject:
        entries = target.flat if target.size <= MAX_ENTRIES else ()
        return _entries(entries, path)
    if kind in HELD_ATTRIBUTES:
        names = HELD_ATTRIBUTES[kind]
        return (Location(f"{path}.{name}", path, getattr(target, name)) for name in names)
    if kind is types.MappingProxyType:
        return iter([Location(f"{path}.<mapping>", path, gc.get_referents(target)[0])])
    if isinstance(target, weakref.ref):
        return iter([Location(f"{path}()", path, weakref.ref.__call__(target))])
    if kind is contextvars.ContextVar:
        namespace = AssigningNamespace(target.set)
        return iter([Location(f"{path}.get()", path, target.get(None), namespace)])
    return _parts_of_instance(target, path)


def refill(container: Any, base: Any, contents: Any) -> None:
    """Replaces the contents of a mutable container with the methods of its built-in base class."""
    base.clear(container)
    if issubclass(base, (dict, set)):
        base.update(container, contents)
    else:
        base.extend(container, contents)


def _entries(container: Any, path: str) -> Iterator[Location]:
    """Yields the entries of a container; order and number belong to the contents of the container."""
    if isinstance(container, dict):
        for idx, (key, value) in enumerate(container.items()):
            yield Location(f"{path}[{_label_of(key, idx)}]", path, value)
    else:
        for idx, value in enumerate(container):
            yield Location(f"{path}[{idx}]", path, value)


def _label_of(key: Any, idx: int) -> str:
    """Returns the label of a key in a path; keys of arbitrary classes are labeled by position.

    The `repr` of such a key would run code of its class.
    """
    if type(key) in PLAIN_TYPES:
        return repr(key)
    if isinstance(key, Enum):
        return f"{type(key).__name__}.{key._name_}"
    if type(key) is tuple and all(type(entry) in PLAIN_TYPES for entry in key):
        return repr(key)
    return f"key {idx}, a {type(key).__name__}"


def _parts_of_instance(instance: Any, path: str) -> Iterator[Location]:
    if isinstance(instance, nn.Module):
        yield from _parts_of_module(instance, path)
    elif isinstance(instance, torch.optim.Optimizer):
        yield from attributes_in(instance, path, _attributes_of_optimizers())
        yield from _hooks(instance, path, _hooks_of_optimizers())
    elif isinstance(instance, torch.utils.data.DataLoader):
        yield from attributes_in(instance, path, _ATTRIBUTES_OF_LOADERS)
    else:
        yield from attributes_in(instance, path)
    yield from _contents(instance, path)
    for base in type(instance).__mro__:
        if is_own_code(base.__module__):
            yield _class_location(base, path)


def _contents(instance: Any, path: str) -> Iterator[Location]:
    """Yields the contents of an instance of a subclass of a container, as a built-in container."""
    for base in _CONTAINER_BASES:
        if isinstance(instance, base):
            entries = base.items(instance) if issubclass(base, dict) else base.__iter__(instance)
            namespace = AssigningNamespace(functools.partial(refill, instance, base))
            yield Location(f"{path}[:]", path, base(entries), namespace)
            return


def _parts_of_module(module: nn.Module, path: str) -> Iterator[Location]:
    """Yields a module's attributes that aren't in its `state_dict`, and its tensors, hooks and submodules."""
    is_compiled = type(module).__name__ == "OptimizedModule"
    if not is_compiled:
        state_names = getattr(module, "_defaults", ())  # the state of a torchmetrics metric
        skipped = _SKIPPED_OF_MODULES.union(state_names) if state_names else _SKIPPED_OF_MODULES
        yield from attributes_in(module, path, skipped)
        for name, buffer in module._buffers.items():
            yield Location(f"{path}.{name}", path, buffer, module._buffers, name)
        for name, parameter in module._parameters.items():
            yield Location(f"{path}.{name}", path, parameter)
    yield from _hooks(module, path, _HOOKS_OF_MODULES)
    for name, submodule in module._modules.items():
        if submodule is not None:
            # A compiled module has the same paths as the module before compilation.
            yield Location(path if is_compiled else f"{path}.{name}", path, submodule)


def _hooks(owner: Any, path: str, names: Collection[str]) -> Iterator[Location]:
    """Yields the hooks of a module or an optimizer that are called during training."""
    attributes = vars(owner)
    for name in names:
        registry = attributes.get(name)
        if registry and isinstance(registry, dict):
            yield from _numbered(registry, f"{path}.{name}", path)


def _parts_of_tensor(tensor: Tensor, path: str) -> Iterator[Location]:
    yield from attributes_in(tensor, path)
    for name in HOOKS_OF_TENSORS:
        yield from _numbered(getattr(tensor, name, None) or {}, f"{path}.{name}", path)


def _numbered(registry: Mapping[Any, Any], path: str, owner: str) -> Iterator[Location]:
    """Yields hooks numbered by order, since torch's keys come from a counter of the whole process."""
    for idx, hook in enumerate(registry.values()):
        yield Location(f"{path}[{idx}]", owner, hook)


def _parts_of_function(function: types.FunctionType, path: str) -> Iterator[Location]:
    yield from _closure(function, path)
    yield from _globals(function, path)


def _closure(function: types.FunctionType, path: str) -> Iterator[Location]:
    """Yields the cells, attributes and default arguments of a function."""
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
