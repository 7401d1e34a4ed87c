"""Whole tensors from shards and shards from whole tensors; free of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer


def whole(value: Any) -> Any:
    """Returns a sharded tensor whole, on its device; anything else as it is. All ranks must call."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shards_like(value: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a whole tensor, on the device of `like`; nothing is sent.

    Args:
        value: the same on every rank; a shard stays what it is.
        like: says over which ranks, along which dimension; where it is not a DTensor, the tensor
            stays what it is.
    """
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return _distributed(value, like, like.placements)


def whole_states(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Returns the state dict of an optimizer with whole tensors on the host. All ranks must call.

    Its layout is torch's own, so that one process can load it.

    Args:
        keep: whether this rank wants it; it gets {} otherwise, and only takes part.
    """
    captured = optimizer.state_dict()
    states = {}
    # One tensor is whole at a time; the host holds the rest.
    for param, state in captured["state"].items():
        pairs = ((name, whole(value)) for name, value in state.items())
        states[param] = {name: _on_host(value) if keep else None for name, value in pairs}
    return {**captured, "state": states} if keep else {}


def load_whole_states(optimizer: Optimizer, states: Mapping[str, Any]) -> None:
    """Loads what `whole_states`, or an optimizer of one process, gave; each rank takes its shard.

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
    if not isinstance(value, Tensor) or not value.ndim or not isinstance(param, DTensor):
        return value
    same_shape = value.shape == param.shape
    return _distributed(value, param, param.placements if same_shape else [Replicate()])


def _distributed(value: Tensor, like: DTensor, placements: Any) -> DTensor:
    mesh = like.device_mesh
    return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
