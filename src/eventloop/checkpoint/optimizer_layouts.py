"""Saves properties of an optimizer's state that a copy loses: strides, and shared tensors.

torch's `load_state_dict` copies each tensor separately, and safetensors stores entries in row-major
order. A sum over a tensor in another memory format rounds differently, so a resumed run would differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from eventloop.checkpoint.encoding import is_dense
from eventloop.object_state.tensor_memory import laid_out
from eventloop.training.sharded_tensors import sharded

Path = tuple[str | int, ...]


def layouts_of(optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Returns the strides and shared tensors of each optimizer's state, by name, as JSON values."""
    layouts = {name: _layout_of(optimizer) for name, optimizer in optimizers.items()}
    return {name: layout for name, layout in layouts.items() if any(layout.values())}


def restore_layouts(optimizers: Mapping[str, Optimizer], layouts: Mapping[str, Any]) -> None:
    """Restores strides and shared tensors, after the states were loaded.

    Args:
        optimizers: by name; their states are changed in place.
        layouts: the result of `layouts_of`.

    Raises:
        LookupError, TypeError, ValueError: the layouts don't fit the states.
    """
    for name, layout in layouts.items():
        states = _states_of(optimizers[name])
        for path, strides in layout["strides"]:
            container, key = _container_at(states, path)
            container[key] = laid_out(container[key], strides, container[key].device)
        for path, first_path in layout["shared"]:
            container, key = _container_at(states, path)
            first_container, first_key = _container_at(states, first_path)
            container[key] = first_container[first_key]


def _layout_of(optimizer: Optimizer) -> dict[str, Any]:
    strides: list[Any] = []
    shared: list[Any] = []
    paths: dict[int, Path] = {}
    for path, tensor in _tensors_in(_states_of(optimizer), ()):
        if (first_path := paths.setdefault(id(tensor), path)) != path:
            shared.append([list(path), list(first_path)])
        elif sharded(tensor) is None and is_dense(tensor) and not tensor.is_contiguous():
            strides.append([list(path), list(tensor.stride())])
    return {"strides": strides, "shared": shared}


def _states_of(optimizer: Optimizer) -> dict[int, Any]:
    """Returns the state of each parameter by the parameter's position over all groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        idx: optimizer.state[param] for idx, param in enumerate(params) if param in optimizer.state
    }


def _tensors_in(state: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, entry in state.items():
            if type(key) in (str, int):
                yield from _tensors_in(entry, (*path, key))
    elif isinstance(state, list):
        for idx, entry in enumerate(state):
            yield from _tensors_in(entry, (*path, idx))


def _container_at(states: Any, path: Any) -> tuple[Any, str | int]:
    container = states
    for key in path[:-1]:
        container = container[key]
    if not isinstance(container, (dict, list)) or not isinstance(container[path[-1]], Tensor):
        raise TypeError(f"there is no tensor at {path}")
    return container, path[-1]
