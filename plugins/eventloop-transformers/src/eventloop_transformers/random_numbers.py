"""States of random generators: the global generators, and those of a data loader."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from eventloop.devices import opened_accelerator

# Attributes by which data loaders and samplers of torch, accelerate and TRL refer to each other.
_PARTS = ("base_dataloader", "dataset", "batch_sampler", "sampler")
_MAX_DEPTH = 6


def rng_states() -> dict[str, Any]:
    """Returns the states of the global generators."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if (accelerator := opened_accelerator()) is not None:
        states["device"] = accelerator.get_rng_state()
    return states


def set_rng_states(states: Mapping[str, Any]) -> None:
    """Restores states from `rng_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    accelerator = opened_accelerator()
    if "device" in states and accelerator is not None:
        accelerator.set_rng_state(states["device"])


class Randoms(NamedTuple):
    """States of the global generators, and of a data loader's generators by attribute path."""

    states: Mapping[str, Any]
    own: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        """Returns the states in a form that a checkpoint can store."""
        kind, keys, *cached_normal = self.states["numpy"]
        numpy = [kind, torch.from_numpy(keys.astype(np.int64)), *cached_normal]
        return {"states": {**self.states, "numpy": numpy}, "own": dict(self.own)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Randoms:
        """Inverse of `state_dict`."""
        states = dict(saved["states"])
        kind, keys, *cached_normal = states["numpy"]
        states["numpy"] = (kind, keys.numpy().astype(np.uint32), *cached_normal)
        return cls(states, saved["own"])


def own_states(loader: Any) -> dict[str, Tensor]:
    """Returns the states of all generators of a data loader and its samplers, by attribute path."""
    return {path: generator.get_state() for path, generator in _generators(loader, "", 0)}


def set_own_states(loader: Any, states: Mapping[str, Tensor]) -> None:
    """Restores states from `own_states`, in the generators that exist."""
    for path, generator in _generators(loader, "", 0):
        if path in states:
            generator.set_state(states[path])


def _generators(owner: Any, path: str, depth: int) -> Iterator[tuple[str, Generator]]:
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, Generator):
            yield f"{path}{name}", value
        elif name in _PARTS and depth < _MAX_DEPTH:
            yield from _generators(value, f"{path}{name}.", depth + 1)
