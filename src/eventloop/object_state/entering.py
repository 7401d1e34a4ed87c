"""Decides which objects a walk enters: those with state in attributes, entries, closures or globals."""

from __future__ import annotations

import argparse
import array
import contextvars
import functools
import random
import site
import sys
import sysconfig
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eventloop.object_state.attributes import attributes_of, slots_of

# The entries of a longer container aren't entered, since a walk must stay fast.
MAX_ENTRIES = 1_000
MAX_NESTING = 16  # of containers in containers

PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
CONTAINER_TYPES = frozenset(
    {list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter}
)
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_CODES_OF_C_NUMBERS = tuple("bBhHiIlLqQfd?")
# Types implemented in C, with the attributes that hold their state.
HELD_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),  # the cache itself only saves time
    property: ("fget", "fset", "fdel"),
    memoryview: ("obj",),
}
# Classes of the standard library whose state is in attributes. Instances of most other classes belong to
# the process: threads, loggers, files.
_STDLIB_TYPES = (
    types.SimpleNamespace,
    argparse.Namespace,
    threading.local,
    threading.Event,
    threading.Semaphore,
)
_STDLIB_MODULES = frozenset({"collections", "queue", "weakref", "fractions"})
_SHARED_NUMBERS = "multiprocessing.sharedctypes"
# Instances of classes in these modules are values; their attributes are only caches.
_MODULES_OF_VALUES = frozenset(
    {
        "builtins",
        "datetime",
        "decimal",
        "functools",
        "inspect",
        "ipaddress",
        "pathlib",
        "re",
        "types",
    }
    | {"typing", "uuid", "zoneinfo"}
)
# Modules of torch whose classes have state in Python attributes; torch's other classes wrap C++ objects.
_TORCH_MODULES = ("torch.utils.data", "torch.nn", "torch.optim", "torch._dynamo.eval_frame")
_EVENTLOOP_MODULES = ("eventloop.data", "eventloop.task")
_OTHER_TRAINERS = ("accelerate", "composer", "lightning", "pytorch_lightning")
_TRAINED_OR_READ = (
    nn.Module,
    torch.optim.Optimizer,
    torch.utils.data.Dataset,
    torch.utils.data.Sampler,
    torch.utils.data.DataLoader,
)


class Family(Enum):
    """How the state of a class's instances is read."""

    PLAIN = "compared by value, or part of the process: numbers, texts, members of enums, modules"
    CONTAINER = "entries"
    TENSOR = "elements, attributes and hooks"
    ARRAY = "elements and attributes"
    SCALAR = "one value of NumPy: a number, text or time"
    NUMBERS = "elements: bytearrays, arrays of the module `array`, ctypes numbers"
    GENERATOR = "its own state, as a random generator or a source of seeds"
    CLASS = "class attributes"
    FUNCTION = "closure and globals"
    METHOD = "the object to which it is bound, in C"
    HOLDER = "the objects that it holds, in C"
    OBJECT = "attributes and slots"


_FAMILIES_WITH_IDENTITY = (
    Family.CONTAINER,
    Family.TENSOR,
    Family.ARRAY,
    Family.NUMBERS,
    Family.GENERATOR,
)


def family_of(value: Any) -> Family:
    """Returns the family of a value's class."""
    kind: Any = type(value)
    return _family_of_class(kind)


# Cached, since each save asks this several times about every object that it visits.
@functools.lru_cache(maxsize=4096)
def _family_of_class(kind: Any) -> Family:
    if kind in PLAIN_TYPES or issubclass(kind, (types.ModuleType, Enum)):
        return Family.PLAIN
    if kind in CONTAINER_TYPES:
        return Family.CONTAINER
    if issubclass(kind, Tensor):
        return Family.TENSOR
    if issubclass(kind, type):
        return Family.CLASS
    if issubclass(kind, _numpy_classes("numpy", "ndarray")):
        return Family.ARRAY
    if issubclass(kind, _numpy_classes("numpy", "generic")):
        return Family.SCALAR
    if issubclass(kind, (torch.Generator, random.Random)) or issubclass(
        kind,
        _numpy_classes("numpy.random", "Generator", "RandomState", "BitGenerator", "SeedSequence"),
    ):
        return Family.GENERATOR
    if kind in (bytearray, array.array) or _is_class_of_c_numbers(kind):
        return Family.NUMBERS
    if kind is types.FunctionType:
        return Family.FUNCTION
    if kind in (types.BuiltinMethodType, types.MethodWrapperType):
        return Family.METHOD
    if kind in HELD_ATTRIBUTES or kind in (types.MappingProxyType, contextvars.ContextVar):
        return Family.HOLDER
    if issubclass(kind, weakref.ref):
        return Family.HOLDER
    return Family.OBJECT


def _numpy_classes(module_name: str, *names: str) -> tuple[type, ...]:
    """Returns classes of NumPy; none if it isn't imported, so that no value is an instance."""
    module = sys.modules.get(module_name)
    return () if module is None else tuple(getattr(module, name) for name in names)


def _is_class_of_c_numbers(kind: Any) -> bool:
    """Returns whether a class is that of ctypes numbers or arrays of numbers, without pointers."""
    ctypes = sys.modules.get("ctypes")
    if ctypes is None:
        return False
    if issubclass(kind, ctypes.Array):
        kind = kind._type_
    return issubclass(kind, ctypes._SimpleCData) and kind._type_ in _CODES_OF_C_NUMBERS


def is_entered(value: Any) -> bool:
    """Returns whether a walk visits the attributes, entries and other locations in an object."""
    kind: Any = type(value)
    family = family_of(value)
    if family is Family.OBJECT:
        has_state = attributes_of(value) is not None or bool(slots_of(value))
        return has_state and is_entered_class(kind)
    if family is Family.CONTAINER:
        return not is_value_container(value)
    if family is Family.TENSOR:
        has_hooks = any(getattr(value, name, None) for name in HOOKS_OF_TENSORS)
        return kind in (Tensor, nn.Parameter) and bool(vars(value) or has_hooks)
    if family is Family.CLASS:
        return is_own_code(value.__module__) and not issubclass(value, Enum)
    if family is Family.ARRAY:
        return value.dtype.hasobject or bool(attributes_of(value))
    if family is Family.GENERATOR:
        return bool(attributes_of(value)) and is_own_code(kind.__module__)
    if family is Family.NUMBERS:
        return is_entered_class(kind) and bool(attributes_of(value) or slots_of(value))
    if family is Family.FUNCTION:
        return is_own_code(value.__module__)
    if family is Family.METHOD:
        return not isinstance(value.__self__, (types.ModuleType, type, types.NoneType))
    return family is Family.HOLDER


def is_value_container(container: Any, depth: int = 0) -> bool:
    """Returns whether a container holds only values, at any depth, and no objects with state.

    Args:
        depth: the number of containers around it.
    """
    if len(container) > MAX_ENTRIES or depth >= MAX_NESTING:
        return True
    entries = container.values() if isinstance(container, dict) else container
    return all(type(entry) in PLAIN_TYPES or _is_value(entry, depth + 1) for entry in entries)


def _is_value(entry: Any, depth: int) -> bool:
    if type(entry) in (tuple, frozenset):
        return is_value_container(entry, depth)
    return isinstance(entry, Enum) or is_numpy_scalar(entry)


def has_identity(value: Any) -> bool:
    """Returns whether a value can be changed in place, so that two locations may share it."""
    return family_of(value) in _FAMILIES_WITH_IDENTITY and type(value) not in (tuple, frozenset)


def is_stdlib_instance(value: Any) -> bool:
    """Returns whether a value is a mutable object of the standard library that isn't entered."""
    kind = type(value)
    root = kind.__module__.partition(".")[0] if isinstance(kind.__module__, str) else ""
    if root not in sys.stdlib_module_names or root in _MODULES_OF_VALUES:
        return False
    return attributes_of(value) is not None or bool(slots_of(value))


def is_array(value: Any) -> bool:
    """Returns whether a value is a NumPy array or an instance of a subclass."""
    return family_of(value) is Family.ARRAY


def is_c_number(value: Any) -> bool:
    """Returns whether a value is a ctypes number or an array of numbers, without pointers."""
    return _is_class_of_c_numbers(type(value))


def is_numpy_scalar(value: Any) -> bool:
    """Returns whether a value is a NumPy scalar: a number, text or time."""
    return family_of(value) is Family.SCALAR


def is_seed_source(value: Any) -> bool:
    """Returns whether a value is a NumPy bit generator or seed sequence."""
    return isinstance(value, _numpy_classes("numpy.random", "BitGenerator", "SeedSequence"))


@functools.lru_cache(maxsize=4096)
def is_own_code(module_name: str | None) -> bool:
    """Returns whether a module is the user's code: neither installed nor part of Python."""
    if not isinstance(module_name, str | None):
        return False  # `__module__` of a class implemented in C may be a descriptor
    root = (module_name or "").partition(".")[0]
    if root in sys.stdlib_module_names or root in ("torch", "eventloop"):
        return root == "__main__"
    path = getattr(sys.modules.get(module_name or ""), "__file__", None)
    if path is None:
        return True
    folders = Path(path).parts
    if "site-packages" in folders or "dist-packages" in folders:
        return False
    if any(Path(path).is_relative_to(folder) for folder in _installed_folders()):
        return False
    # Packages that were installed with `--target` have their *.dist-info in the same folder.
    depth = (module_name or "").count(".") + (Path(path).name == "__init__.py")
    parents = Path(path).parents
    return not _has_distributions(parents[min(depth, len(parents) - 1)])


@functools.cache
def _installed_folders() -> frozenset[str]:
    folders = (sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
    return frozenset({*folders, *site.getsitepackages(), site.getusersitepackages()})


@functools.lru_cache(maxsize=256)
def _has_distributions(folder: Path) -> bool:
    """Returns whether packages are installed in a folder, for example by `pip install --target`."""
    return next(folder.glob("*.dist-info"), None) is not None


@functools.lru_cache(maxsize=4096)
def is_entered_class(kind: Any) -> bool:
    """Returns whether the state of a class's instances is in attributes."""
    if issubclass(kind, _STDLIB_TYPES):
        return True
    # Modules first: FSDP2 changes their class to a class of torch, which the check of module names
    # below would exclude. The state of a TorchScript module is in C++.
    if issubclass(kind, nn.Module) and not issubclass(kind, torch.jit.ScriptModule):
        return True
    module_name: object = kind.__module__
    if not isinstance(module_name, str):
        return False  # for Cython functions, it is a descriptor
    root = module_name.partition(".")[0]
    if root == "torch":
        return module_name.startswith(_TORCH_MODULES)
    if root == "eventloop":  # the other objects of the loop save their own state
        return module_name.startswith(_EVENTLOOP_MODULES)
    if root in _STDLIB_MODULES or module_name == _SHARED_NUMBERS:
        return True
    if is_of_trainer(module_name):
        return issubclass(kind, _TRAINED_OR_READ)
    return root == "__main__" or root not in (*sys.stdlib_module_names, "numpy")


def is_of_trainer(module_name: str) -> bool:
    """Returns whether a module belongs to a plugin's package or to another trainer.

    Of the objects of such modules, only models, optimizers and data are entered. The others save their
    own state, or are created at each start.
    """
    root = module_name.partition(".")[0]
    return root.startswith("eventloop") or root in _OTHER_TRAINERS
