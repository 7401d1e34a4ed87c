"""The state of the objects that draw data: samplers, random generators, and the objects inside them."""

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
    """The protocol of `torch.distributed.checkpoint.stateful.Stateful`."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restores what `state_dict` returned."""


class SamplingState:
    """Saves and restores the objects that draw data.

    Samplers and data sets with `state_dict` and `load_state_dict` save their state themselves; all
    other objects are walked over.

    Args:
        roots: the objects by name: a data loader, or a sampler and a generator. Paths in messages begin
            with the name.
        excluded: objects that are reachable from the roots but whose state is saved elsewhere.

    Attributes:
        iterators: the paths of iterators, whose positions can't be saved.
    """

    def __init__(self, roots: Mapping[str, Any], excluded: Iterable[Any] = ()) -> None:
        excluded = list(excluded)
        objects = walk(roots, set(map(id, excluded))).objects | dict(roots)
        self._stateful = {
            path: sampling_object
            for path, sampling_object in objects.items()
            # Except for data loaders: torchdata's would start workers to return its state.
            if isinstance(sampling_object, Stateful) and not isinstance(sampling_object, DataLoader)
            if path in roots or isinstance(sampling_object, Sampler | Dataset)
        }
        excluded += [*self._stateful.values(), *roots.values()]
        self._roots = {name: root for name, root in roots.items() if root is not None}
        self._objects = {
            name: TrackedObjects({name: root}, excluded) for name, root in self._roots.items()
        }
        self.iterators = [
            path for objects in self._objects.values() for path in objects.unsavable_iterators()
        ]

    def state_dict(self, *, with_global: bool) -> dict[str, Any]:
        """Returns the state.

        Args:
            with_global: whether to include the global generators of the process.
        """
        states = {
            path: {
                "kind": type(stateful).__qualname__,
                "state": copy.deepcopy(stateful.state_dict()),
            }
            for path, stateful in self._stateful.items()
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
            ValueError: a saved value can't be restored in an object.
        """
        set_global_rng_states(state.get("shared", {}))
        for name, saved in state.get("objects", {}).items():
            # With another number of ranks, a DistributedSampler may have replaced a sampler or vice
            # versa; their states don't fit each other.
            if name in self._roots and type(self._roots[name]).__qualname__ == saved["kind"]:
                self._objects[name].load_state_dict(saved)
        for path, saved in state.get("stateful", {}).items():
            stateful = self._stateful.get(path)
            if stateful is not None and type(stateful).__qualname__ == saved["kind"]:
                stateful.load_state_dict(saved["state"])


def samplers_of(sampler: Any) -> list[Any]:
    """Returns a sampler and the samplers that are nested in its attributes, outermost first."""
    samplers: list[Any] = []
    waiting = [sampler]
    while waiting:
        candidate = waiting.pop(0)
        if not any(candidate is known_sampler for known_sampler in samplers):
            samplers.append(candidate)
            waiting += [
                value
                for name, value in getattr(candidate, "__dict__", {}).items()
                if isinstance(value, Sampler) or name.endswith("sampler")
            ]
    return samplers
