"""Reads and assigns attributes and slots without running code of the objects."""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

_DYNAMO_PREFIX = "_dynamo_"  # attributes that torch.compile sets on tensors


class Location(NamedTuple):
    """The location of a value in an object graph.

    Attributes:
        path: the location as Python code, `sampler.queue` or `stages[2].rng`; unique in a walk.
        owner: the path of the object that holds the value; "" for a root.
        value: the current value.
        namespace: supports `namespace[key] = value`, without running code of the owner's class; None if
            the location can't be assigned to.
        key: the key of the value in the namespace.
        is_deletable: whether the namespace supports `del namespace[key]`.
    """

    path: str
    owner: str
    value: Any
    namespace: Any = None
    key: str = ""
    is_deletable: bool = False

    def assign(self, value: Any) -> None:
        """Assigns a value to the location."""
        self.namespace[self.key] = value

    def delete(self) -> None:
        """Removes the attribute."""
        del self.namespace[self.key]


class SlotNamespace:
    """A namespace of the slots of an object.

    Args:
        instance: the object.
    """

    def __init__(self, instance: Any) -> None:
        self._instance = instance
        self._slots = slots_of(instance)

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._instance, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self._instance)


class ClassNamespace:
    """A namespace of the attributes of a class; bypasses its metaclass."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self._kind, name, value)

    def __delitem__(self, name: str) -> None:
        type.__delattr__(self._kind, name)


class AssigningNamespace:
    """A namespace of a single value that is assigned by a function."""

    def __init__(self, assign: Callable[[Any], object]) -> None:
        self._assign = assign

    def __setitem__(self, key: str, value: Any) -> None:
        self._assign(value)


def attributes_in(instance: Any, path: str, skipped: Collection[str] = ()) -> Iterator[Location]:
    """Yields the attributes and slots of an instance."""
    attributes = attributes_of(instance)
    for name, value in (attributes or {}).items():
        if name in skipped or is_dunder(name) or name.startswith(_DYNAMO_PREFIX):
            continue
        yield Location(f"{path}.{name}", path, value, attributes, name, True)
    for name, member in slots_of(instance).items():
        try:
            value = member.__get__(instance)
        except AttributeError:  # an empty slot
            continue
        yield Location(f"{path}.{name}", path, value, SlotNamespace(instance), name, True)


def attribute_location(instance: Any, name: str, path: str, value: Any = None) -> Location:
    """Returns the location of an instance attribute or slot, which may not exist yet."""
    is_slot = name in slots_of(instance)
    namespace = SlotNamespace(instance) if is_slot else attributes_of(instance)
    return Location(f"{path}.{name}", path, value, namespace, name, True)


def class_attribute_location(kind: type, name: str, path: str, value: Any = None) -> Location:
    """Returns the location of an attribute of a class, which may not exist yet."""
    return Location(f"{path}.{name}", path, value, ClassNamespace(kind), name, True)


def is_attribute(instance: Any, name: str) -> bool:
    """Returns whether an instance may get a data attribute with this name.

    False if the attribute would hide a method or a property of its class.
    """
    if name in slots_of(instance):
        return True
    if not name.isidentifier() or is_dunder(name) or attributes_of(instance) is None:
        return False
    class_attribute = inspect.getattr_static(type(instance), name, None)
    if isinstance(class_attribute, functools.cached_property):
        return True
    return not is_code(class_attribute)


def is_class_attribute(kind: type, name: str) -> bool:
    """Returns whether a class may get a data attribute with this name, which must not replace code."""
    return name.isidentifier() and not name.startswith("__") and not is_code(vars(kind).get(name))


def is_code(class_attribute: Any) -> bool:
    """Returns whether an attribute of a class is a method or a descriptor."""
    return callable(class_attribute) or hasattr(type(class_attribute), "__get__")


def is_dunder(name: str) -> bool:
    """Returns whether a name is reserved for Python, like `__doc__`."""
    return name.startswith("__") and name.endswith("__")


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Returns the `__dict__` of an instance; None if it has none."""
    # `object.__getattribute__` would not return the attributes of the current thread.
    reader = threading.local if isinstance(value, threading.local) else object
    try:
        attributes = reader.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def slots_of(value: Any) -> dict[str, types.MemberDescriptorType]:
    """Returns the descriptors of `__slots__` by name, including those of base classes."""
    kind: Any = type(value)
    return _slots_of_class(kind)


# Cached, since a walk asks for the slots of every object.
@functools.lru_cache(maxsize=4096)
def _slots_of_class(kind: Any) -> dict[str, types.MemberDescriptorType]:
    members: dict[str, types.MemberDescriptorType] = {}
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, member in vars(base).items():
                if isinstance(member, types.MemberDescriptorType):
                    # A class may have a slot that hides a slot of its base class.
                    is_hidden = name in members
                    members[f"{base.__name__}::{name}" if is_hidden else name] = member
    return members
