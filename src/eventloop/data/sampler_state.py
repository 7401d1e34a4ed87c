"""The state of samplers, with or without `state_dict`: generators, and attributes that iterating changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Sampler

from eventloop.rng import (
    arrays_to_tensors,
    get_rng_state,
    is_generator,
    set_rng_state,
    tensors_to_arrays,
)

_PLAIN = (bool, int, float, str, type(None))


@runtime_checkable
class Stateful(Protocol):
    """An object like those of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores what `state_dict` returned."""


class SamplerState:
    """Saves and restores a sampler.

    One with `state_dict` and `load_state_dict` does it itself. Of any other the state is its
    generators, and the attributes of plain values that have changed since the loader was built.
    """

    def __init__(self, sampler: Any) -> None:
        self.kind = type(sampler).__qualname__
        self._sampler = sampler
        self._built = {} if isinstance(sampler, Stateful) else _plain_attributes(sampler)

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, with the name of its class."""
        if isinstance(self._sampler, Stateful):
            return {"kind": self.kind, "state": self._sampler.state_dict()}
        attributes = _attributes(self._sampler).items()
        rng_states = {name: get_rng_state(one) for name, one in attributes if is_generator(one)}
        changed = {
            name: arrays_to_tensors(value)
            for name, value in _plain_attributes(self._sampler).items()
            if name not in self._built or not _equal(value, self._built[name])
        }
        return {"kind": self.kind, "generators": rng_states, "attributes": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: an attribute isn't one that its class sets.
        """
        if isinstance(self._sampler, Stateful):
            self._sampler.load_state_dict(state["state"])
            return
        attributes = _attributes(self._sampler)
        for name, rng_state in state["generators"].items():
            if is_generator(attributes.get(name)):
                set_rng_state(attributes[name], rng_state)
        for name, saved in state["attributes"].items():
            value = tensors_to_arrays(saved)
            if not declares(self._sampler, name) or not _is_plain(value):
                raise ValueError(
                    f"a {self.kind} sets no attribute {name!r} to values of this kind; give it "
                    "state_dict and load_state_dict"
                )
            setattr(self._sampler, name, _copied(value))


def samplers_of(sampler: Any) -> list[Any]:
    """Returns a sampler and those that it is made of, as far as they are its attributes."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if not any(part is other for other in found):
            found.append(part)
            waiting += [
                value
                for name, value in _attributes(part).items()
                if isinstance(value, Sampler) or name.endswith("sampler")
            ]
    return found


def declares(target: Any, name: str) -> bool:
    """Whether the code of an object sets an attribute: no other is set by a name from a file.

    An attribute of its class, such as a method or a property, isn't data and would be hidden.
    """
    of_class = inspect.getattr_static(type(target), name, None)
    if callable(of_class) or hasattr(type(of_class), "__get__") or name.startswith("__"):
        return False
    return name in _attributes(target) or any(
        name in code.co_names for code in _codes(type(target))
    )


def _codes(kind: type) -> Iterator[CodeType]:
    for base in kind.__mro__:
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, FunctionType):
                yield function.__code__


def _attributes(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    """Returns copies of those that hold plain values; torch's own samplers change none."""
    if type(sampler).__module__.startswith("torch."):
        return {}
    attributes = _attributes(sampler).items()
    return {name: _copied(value) for name, value in attributes if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN or isinstance(value, Tensor) or type(value).__name__ == "ndarray":
        return True
    return type(value) in (list, tuple) and all(type(entry) in _PLAIN for entry in value)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value.copy() if hasattr(value, "copy") else value


def _equal(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    same = torch.equal(value, other) if isinstance(value, Tensor) else value == other
    return bool(same.all() if hasattr(same, "all") else same)
