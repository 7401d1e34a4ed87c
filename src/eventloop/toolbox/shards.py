"""Tensors of which each rank holds a shard, as FSDP2 makes them: what a checkpoint has of them, and back."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.saved_tensors import Box, SavedTensor
from eventloop.training.slices import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["local", "shard_of", "sharded", "slice_of"]


def sharded(value: Any) -> DTensor | None:
    """Returns a tensor of which each rank holds a shard; None for anything else."""
    # Sharding has imported this already; importing it takes a second, so nothing else does.
    module = sys.modules.get("torch.distributed.tensor")
    return value if module is not None and isinstance(value, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, sharing its memory, without a graph."""
    one = sharded(tensor)
    return tensor.detach() if one is None else one.to_local().detach()


def slice_of(value: Any, entries: Tensor | None = None) -> Any:
    """Returns what a checkpoint has of a tensor: of a sharded one this rank's slice.

    Args:
        value: anything but a sharded tensor stays as it is.
        entries: what stands in the place of those that this rank holds.
    """
    one = sharded(value)
    if one is None:
        return value if entries is None else entries
    _, offsets = _place(one.shape, one, one.placements)
    at = zip(one.placements, one.device_mesh.get_coordinate() or (), strict=True)
    is_copy = any(placement.is_replicate() and place > 0 for placement, place in at)
    held = local(one) if entries is None else entries
    return TensorSlice(held, tuple(one.shape), offsets, is_copy)


def shard_of(value: Any, like: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Returns this rank's entries of a whole tensor, on the device of `like`; nothing is sent.

    Args:
        value: a tensor, the same on every rank; a `SavedTensor`, of which they are read alone; or this
            rank's `TensorSlice`.
        like: a tensor that is spread over the ranks in the same way; one that isn't wants all entries.
        placements: how they are spread over its ranks, where that is another way.
    """
    one = sharded(like)
    if isinstance(value, TensorSlice):
        return value.tensor.to(like.device)
    if one is None:
        return (value.read() if isinstance(value, SavedTensor) else value).to(like.device)
    shape, offsets = _place(value.shape, one, one.placements if placements is None else placements)
    if isinstance(value, SavedTensor):
        return value.read_slice(offsets, shape).to(like.device)
    return Box(offsets, shape).of(value).to(like.device, copy=True)


def _place(
    shape: tuple[int, ...], like: DTensor, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offsets of this rank's shard of a tensor."""
    # Private: where a shard stands in the whole, with any mesh and placements (torch 2.13).
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    held, offsets = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    return tuple(held), tuple(offsets)
