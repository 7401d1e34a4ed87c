"""Shards as slices for checkpoints, and shards from whole tensors or from files; free of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from eventloop.toolbox.shards import shard_of, slice_of
from eventloop.toolbox.state_dicts import SavedTensor


def shards_like(value: Any, like: Tensor) -> Any:
    """Returns this rank's shard of a whole tensor, on the device of `like`; nothing is sent.

    Args:
        value: the same on every rank; a shard stays what it is, of a saved tensor the shard is read.
        like: says over which ranks, along which dimension; where it is not a DTensor, the tensor
            stays what it is.
    """
    if isinstance(like, DTensor) and not isinstance(value, DTensor):
        return _distributed(value, like, like.placements)
    return value.read() if isinstance(value, SavedTensor) else value


def sliced_states(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state dict of an optimizer with slices in the place of shards."""
    captured = optimizer.state_dict()
    states = {
        param: {name: slice_of(value) for name, value in state.items()}
        for param, state in captured["state"].items()
    }
    return {**captured, "state": states}


def load_states(optimizer: Optimizer, states: Mapping[str, Any]) -> None:
    """Loads the states of an optimizer as one process has them; each rank takes its shard.

    A tensor of its parameter's shape is sharded as the parameter is, any other tensor with
    dimensions is kept whole on every rank.
    """
    order = [param for group in optimizer.param_groups for param in group["params"]]
    sharded = {
        idx: {name: _state_like(value, order[int(idx)]) for name, value in state.items()}
        for idx, state in states["state"].items()
    }
    optimizer.load_state_dict({**states, "state": sharded})


def _state_like(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor | SavedTensor):
        return value
    if not value.shape or not isinstance(param, DTensor):
        return value.read() if isinstance(value, SavedTensor) else value
    same_shape = tuple(value.shape) == tuple(param.shape)
    return _distributed(value, param, param.placements if same_shape else [Replicate()])


def _distributed(value: Tensor | SavedTensor, like: DTensor, placements: Any) -> DTensor:
    entries = shard_of(value, like, placements)
    size, strides = torch.Size(value.shape), _strides(value.shape)
    return DTensor.from_local(
        entries, like.device_mesh, placements, run_check=False, shape=size, stride=strides
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))
