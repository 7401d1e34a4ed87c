"""Where random generators are: the global ones, and those of a data loader."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from eventloop.devices import opened_accelerator

# What data loaders and samplers of torch, accelerate and TRL hold each other by.
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
    """Restores what `rng_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    accelerator = opened_accelerator()
    if "device" in states and accelerator is not None:
        accelerator.set_rng_state(states["device"])


class Randoms(NamedTuple):
    """States of the global generators, and of those of a data loader by where it holds them."""

    states: Mapping[str, Any]
    own: Mapping[str, Tensor]

    def state_dict(self) -> dict[str, Any]:
        """Returns them as a checkpoint can hold them."""
        kind, keys, *rest = self.states["numpy"]
        numpy = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
        return {"states": {**self.states, "numpy": numpy}, "own": dict(self.own)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Randoms:
        """Returns them from what `state_dict` returned."""
        states = dict(saved["states"])
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, keys.numpy().astype(np.uint32), *rest)
        return cls(states, saved["own"])


def own_states(loader: Any) -> dict[str, Tensor]:
    """Returns the states of the generators that a data loader and what it is made of hold, by where."""
    return {path: one.get_state() for path, one in _generators(loader, "", 0)}


def set_own_states(loader: Any, states: Mapping[str, Tensor]) -> None:
    """Restores what `own_states` returned, in those generators that are there."""
    for path, one in _generators(loader, "", 0):
        if path in states:
            one.set_state(states[path])


def _generators(one: Any, path: str, depth: int) -> Iterator[tuple[str, Generator]]:
    for name, value in getattr(one, "__dict__", {}).items():
        if isinstance(value, Generator):
            yield f"{path}{name}", value
        elif name in _PARTS and depth < _MAX_DEPTH:
            yield from _generators(value, f"{path}{name}.", depth + 1)
