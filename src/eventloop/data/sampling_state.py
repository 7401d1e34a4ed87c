"""The state by which data are drawn: samplers, random generators, and whatever they are made of."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader, Dataset, Sampler

from eventloop.object_state.tracked import TrackedObjects
from eventloop.object_state.walk import walk
from eventloop.rng import global_rng_states, set_global_rng_states


@runtime_checkable
class Stateful(Protocol):
    """An object like those of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores what `state_dict` returned."""


class SamplingState:
    """Saves and restores the objects by which data are drawn.

    Samplers and data sets with `state_dict` and `load_state_dict` save their state by themselves; all
    else is walked over.

    Args:
        roots: the objects by name: a data loader, or a sampler and a generator. A name begins the
            paths in messages.
        apart: objects to which they refer and whose state is saved elsewhere.

    Attributes:
        iterators: the paths of iterators, whose positions can't be saved.
    """

    def __init__(self, roots: Mapping[str, Any], apart: Iterable[Any] = ()) -> None:
        apart = list(apart)
        parts = walk(roots, set(map(id, apart))).objects | dict(roots)
        self._stateful = {
            path: part
            for path, part in parts.items()
            # A data loader isn't asked: torchdata's would start workers to return its state.
            if isinstance(part, Stateful) and not isinstance(part, DataLoader)
            if path in roots or isinstance(part, Sampler | Dataset)
        }
        apart += [*self._stateful.values(), *roots.values()]
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._objects = {
            name: TrackedObjects({name: root}, apart) for name, root in self._roots.items()
        }
        self.iterators = [
            path for objects in self._objects.values() for path in objects.unsavable_iterators()
        ]

    def state_dict(self, *, with_global: bool) -> dict[str, Any]:
        """Returns the state.

        Args:
            with_global: whether the generators are included that all code of the process shares.
        """
        states = {
            path: {"kind": type(part).__qualname__, "state": copy.deepcopy(part.state_dict())}
            for path, part in self._stateful.items()
        }
        objects = {
            name: {"kind": type(root).__qualname__, **self._objects[name].state_dict()}
            for name, root in self._roots.items()
        }
        state = {"objects": objects, "stateful": states}
        return state | {"shared": global_rng_states()} if with_global else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: an object has no place for a value.
        """
        set_global_rng_states(state.get("shared", {}))
        for name, saved in state.get("objects", {}).items():
            # With another number of ranks, torch's sampler for several may be in place of another.
            if name in self._roots and type(self._roots[name]).__qualname__ == saved["kind"]:
                self._objects[name].load_state_dict(saved)
        for path, saved in state.get("stateful", {}).items():
            part = self._stateful.get(path)
            if part is not None and type(part).__qualname__ == saved["kind"]:
                part.load_state_dict(saved["state"])


def samplers_of(sampler: Any) -> list[Any]:
    """Returns a sampler and those that it is made of, as far as they are its attributes."""
    samplers: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop(0)
        if not any(part is other for other in samplers):
            samplers.append(part)
            waiting += [
                value
                for name, value in getattr(part, "__dict__", {}).items()
                if isinstance(value, Sampler) or name.endswith("sampler")
            ]
    return samplers
