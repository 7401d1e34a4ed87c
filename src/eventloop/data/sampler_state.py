"""The state of samplers, with or without `state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Sampler

from eventloop.object_state.generators import encode_generator
from eventloop.object_state.tracked import TrackedObjects
from eventloop.object_state.values import Encoder
from eventloop.rng import is_generator, tensors_to_arrays

_ROOT = "sampler"


@runtime_checkable
class Stateful(Protocol):
    """An object like those of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores what `state_dict` returned."""


class SamplerState:
    """Saves and restores a sampler.

    A sampler with `state_dict` and `load_state_dict` does it itself; any other is walked over.

    Args:
        sampler: any iterable of indices or batches of them.
        apart: objects whose state is saved elsewhere: other samplers and the data set.
    """

    def __init__(self, sampler: Any, apart: Iterable[Any] = ()) -> None:
        self.kind = type(sampler).__qualname__
        self._sampler = sampler
        self._objects: TrackedObjects | None = None
        if not isinstance(sampler, Stateful):
            self._objects = TrackedObjects({_ROOT: sampler}, apart)

    def state_dict(self) -> dict[str, Any]:
        """Returns its state, with the name of its class."""
        if self._objects is None:
            return {"kind": self.kind, "state": copy.deepcopy(self._sampler.state_dict())}
        return {"kind": self.kind, "objects": self._objects.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: the sampler has no place for a value.
        """
        if self._objects is None:
            self._sampler.load_state_dict(state["state"])
        elif "objects" in state:
            self._objects.load_state_dict(state["objects"])
        else:
            self._objects.load_state_dict(self._state_of_earlier_version(state))

    def _state_of_earlier_version(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the state that version 0.1 saved: generators and plain values by attribute."""
        contents: dict[str, Any] = {}
        for name, rng_state in state["generators"].items():
            generator = vars(self._sampler).get(name)
            if is_generator(generator):
                contents[f"{_ROOT}.{name}"] = encode_generator(generator) | {"state": rng_state}
        encoder = Encoder(lambda value: None)
        values = {
            f"{_ROOT}.{name}": encoder.encode(tensors_to_arrays(value))
            for name, value in state["attributes"].items()
        }
        return {"contents": contents, "values": values, "gone": [], "lost": {}}


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


def _attributes(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})
