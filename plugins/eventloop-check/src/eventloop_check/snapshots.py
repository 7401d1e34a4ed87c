"""Snapshots: what a plugin could change without assigning to the State."""

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
        attribute: of the State: "model"; "" for random generators, which aren't part of it.
        detail: the rest of its name in messages.
    """

    attribute: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.attribute} {self.detail}".strip()

    def of(self, detail: str) -> Part:
        """Returns a part of this one."""
        return Part(self.attribute, f"{self.detail} {detail}".strip())


class StateSnapshot:
    """What could be changed at one moment, for a comparison with a later one.

    Args:
        state: the State, or a view of it.
        everything: tensors alone, or also optimizers' values, training modes, and the random
            generators that all share.
    """

    def __init__(self, state: Any, *, everything: bool) -> None:
        self._everything = everything
        # Kept, so that no other tensor gets the same address.
        self._tensors = dict(_tensors(state))
        self._versions = {name: _version(tensor) for name, tensor in self._tensors.items()}
        self._places = {name: _place(tensor) for name, tensor in self._tensors.items()}
        self._values = dict(_values(state)) if everything else {}
        self._generators = dict(_generators(state)) if everything else {}

    def changes(self, state: Any) -> Iterator[tuple[str, Part]]:
        """Yields what changed since: what was done, and to what."""
        for name, tensor in self._tensors.items():
            if _version(tensor) != self._versions[name]:
                yield "wrote in place into", name
        if not self._everything:
            return
        now = StateSnapshot(state, everything=True)
        for name, tensor in self._tensors.items():
            if now._tensors.get(name) is not tensor:
                yield "replaced or took away", name
            elif now._places[name] != self._places[name]:
                yield "replaced the data of", name
        for name in {**self._values, **now._values}:
            if self._values.get(name) != now._values.get(name):
                yield "changed", name
        for name, numbers in self._generators.items():
            if not _same(numbers, now._generators[name]):
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
    """Yields what has a value and no version: options of optimizers, and training modes."""
    for name, optimizer in state.optimizers.items():
        for idx, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                params = key == "params"
                known = [id(one) for one in value] if params else _comparable(value)
                yield Part("optimizer", f"{name!r} group {idx} {key}"), known
        for idx, values in enumerate(optimizer.state.values()):
            for key, value in values.items() if isinstance(values, Mapping) else ():
                if not isinstance(value, Tensor):
                    part = Part("optimizer", f"{name!r} state {idx} {key}")
                    yield part, _comparable(value)
    for name, module in state.model.named_modules():
        yield Part("model", f"{name}.training".lstrip(".")), module.training


def _generators(state: Any) -> Iterator[tuple[Part, object]]:
    """Yields the states of the generators of random numbers that all share."""
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
        for key, one in value.items():
            yield from _nested(part.of(f"[{key!r}]"), one)
    elif isinstance(value, (tuple, list)):
        for idx, one in enumerate(value):
            yield from _nested(part.of(f"[{idx}]"), one)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _nested(part.of(f".{field.name}"), getattr(value, field.name))


def _version(tensor: Tensor) -> int:
    """Returns the number that every write in place counts up; inference tensors have none."""
    # Private, but the only trace that a write leaves (torch 2.13).
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> int:
    """Returns the address of a tensor's data; 0 for one that has none, by its layout or under vmap."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a transform of torch.func stands in for it; nothing public tells
        return 0


def _comparable(value: object) -> object:
    """Returns a key that differs when the value differs, without reading from the device."""
    return (id(value), _version(value)) if isinstance(value, Tensor) else repr(value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool((one == other) if isinstance(one, int | str | float) or one is None else
                (one == other).all())  # fmt: skip
