"""Tensors of which each rank holds a shard, as FSDP makes them: the shard, and the whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether each rank holds a part of a tensor."""
    return _sharded(tensor) is not None


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, sharing its memory, without a graph."""
    tensor = tensor.detach()
    sharded = _sharded(tensor)
    return tensor if sharded is None else sharded.to_local()


def whole(shard: Tensor, like: Tensor) -> Tensor:
    """Returns the whole of which every rank holds a shard, as it does of `like`; all must call."""
    sharded = _sharded(like)
    if sharded is None:
        return shard
    mesh, placements = sharded.device_mesh, sharded.placements
    return (
        type(sharded)
        .from_local(shard, mesh, placements, shape=like.shape, stride=like.stride())
        .full_tensor()
    )


def shard_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's shard of a whole tensor, as of `like` and on its device."""
    sharded, tensor = _sharded(like), tensor.to(like.device)
    if sharded is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = sharded.device_mesh, sharded.placements
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None).to_local()


def _sharded(tensor: Tensor) -> DTensor | None:
    # Sharding has imported this already; importing it takes a second, so nothing else does.
    tensors = sys.modules.get("torch.distributed.tensor")
    is_one = tensors is not None and isinstance(tensor, tensors.DTensor)
    return tensor if is_one else None  # type: ignore[return-value]
