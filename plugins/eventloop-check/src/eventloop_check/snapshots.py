"""Snapshots of everything that a plugin could change without assigning to the State."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eventloop.devices import kind_of


class Part(NamedTuple):
    """Something that a plugin can change.

    Args:
        attribute: attribute of the State: "model"; "" for global random generators.
        detail: rest of its name in messages.
    """

    attribute: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.attribute} {self.detail}".strip()

    def of(self, detail: str) -> Part:
        """Returns a component of this part."""
        return Part(self.attribute, f"{self.detail} {detail}".strip())


class StateSnapshot:
    """The changeable state at a moment, to compare with a later moment.

    Args:
        state: the State, or a view of it.
        everything: whether to include optimizers' values, training modes and the global random
            generators, or only tensors.
    """

    def __init__(self, state: Any, *, everything: bool) -> None:
        self._everything = everything
        # Kept, so that no other tensor gets the same address.
        self._tensors = dict(_tensors(state))
        self._versions = {name: _version(tensor) for name, tensor in self._tensors.items()}
        self._addresses = {name: _address(tensor) for name, tensor in self._tensors.items()}
        self._values = dict(_values(state)) if everything else {}
        self._generators = dict(_generators(state)) if everything else {}

    def changes(self, state: Any) -> Iterator[tuple[str, Part]]:
        """Yields the changes since the snapshot: the action, and the part that changed."""
        for name, tensor in self._tensors.items():
            if _version(tensor) != self._versions[name]:
                yield "wrote in place into", name
        if not self._everything:
            return
        current = StateSnapshot(state, everything=True)
        for name, tensor in self._tensors.items():
            if current._tensors.get(name) is not tensor:
                yield "replaced or took away", name
            elif current._addresses[name] != self._addresses[name]:
                yield "replaced the data of", name
        for name in {**self._values, **current._values}:
            if self._values.get(name) != current._values.get(name):
                yield "changed", name
        for name, numbers in self._generators.items():
            if not _is_same(numbers, current._generators[name]):
                yield "drew from, or seeded,", name


def _tensors(state: Any) -> Iterator[tuple[Part, Tensor]]:
    """Yields the tensors that a callback could write into."""
    for name in ("batch", "microbatch", "outputs", "loss"):
        yield from _nested(Part(name), getattr(state, name))
    for name, parameter in state.model.named_parameters():
        yield Part("model", name), parameter
        if parameter.grad is not None:
            yield Part("gradient", name), parameter.grad
    for name, buffer in state.model.named_buffers():
        yield Part("model", name), buffer
    for name, optimizer in state.optimizers.items():
        for idx, values in enumerate(optimizer.state.values()):
            yield from _nested(Part("optimizer", f"{name!r} state {idx}"), values)


def _values(state: Any) -> Iterator[tuple[Part, object]]:
    """Yields values without a version counter: options of optimizers, and training modes."""
    for name, optimizer in state.optimizers.items():
        for idx, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                is_params = key == "params"
                shown = [id(param) for param in value] if is_params else _comparable(value)
                yield Part("optimizer", f"{name!r} group {idx} {key}"), shown
        for idx, values in enumerate(optimizer.state.values()):
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if not isinstance(value, Tensor):
                    option = Part("optimizer", f"{name!r} state {idx} {key}")
                    yield option, _comparable(value)
    for name, module in state.model.named_modules():
        yield Part("model", f"{name}.training".lstrip(".")), module.training


def _generators(state: Any) -> Iterator[tuple[Part, object]]:
    """Yields the states of the global random generators."""
    yield Part("", "Python's random numbers"), random.getstate()
    if numpy := sys.modules.get("numpy"):
        yield Part("", "NumPy's random numbers"), numpy.random.get_state(legacy=True)
    yield Part("", "torch's random numbers"), torch.random.get_rng_state()
    if (of_device := kind_of(state.device).get_rng_state()) is not None:
        yield Part("", "torch's random numbers on the device"), of_device


def _nested(part: Part, value: Any) -> Iterator[tuple[Part, Tensor]]:
    if isinstance(value, Tensor):
        yield part, value
    elif isinstance(value, Mapping):
        for key, nested in value.items():
            yield from _nested(part.of(f"[{key!r}]"), nested)
    elif isinstance(value, (tuple, list)):
        for idx, nested in enumerate(value):
            yield from _nested(part.of(f"[{idx}]"), nested)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _nested(part.of(f".{field.name}"), getattr(value, field.name))


def _version(tensor: Tensor) -> int:
    """Returns the counter that every write in place increments; 0 for inference tensors, which have none."""
    # Private, but the only trace that a write leaves (torch 2.13).
    return 0 if tensor.is_inference() else tensor._version


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's data; 0 if it has none, by its layout or under vmap."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # inside a torch.func transform; no public function can test for it
        return 0


def _comparable(value: object) -> object:
    """Returns a key that differs when the value differs, without reading from the device."""
    return (id(value), _version(value)) if isinstance(value, Tensor) else repr(value)


def _is_same(state: Any, other_state: Any) -> bool:
    if isinstance(state, Tensor):
        return torch.equal(state, other_state)
    if isinstance(state, tuple):
        return len(state) == len(other_state) and all(map(_is_same, state, other_state))
    if isinstance(state, int | str | float) or state is None:
        return bool(state == other_state)
    return bool((state == other_state).all())
