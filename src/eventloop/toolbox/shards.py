"""Sharded tensors, as FSDP2 creates them: to the slices in a checkpoint, and back; layers that are sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eventloop.checkpoint.saved_tensors import SavedTensor
from eventloop.checkpoint.tensors import Box
from eventloop.mesh import Layout
from eventloop.training.compiling import repeated_layers
from eventloop.training.sharded_tensors import groups_of, local, sharded, sum_over_, total_norm
from eventloop.training.tensor_slices import TensorSlice

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

__all__ = ["Layout", "groups_of", "local", "repeated_layers", "shard_of", "sharded", "slice_of"]
__all__ += ["sum_over_", "total_norm"]


def slice_of(value: Any, entries: Tensor | None = None) -> Any:
    """Returns this rank's slice of a sharded tensor, for a checkpoint.

    Args:
        value: anything but a sharded tensor is returned unchanged.
        entries: used instead of this rank's shard.
    """
    one = sharded(value)
    if one is None:
        return value if entries is None else entries
    _, offsets = _held(one.shape, one, one.placements)
    mesh = one.device_mesh
    at = zip(one.placements, mesh.get_coordinate() or (), strict=True)
    # Private: the run's whole mesh, of whose other dimensions each index has the same (torch 2.13).
    root = mesh._get_root_mesh()
    named = zip(root.mesh_dim_names or (), root.get_coordinate() or (), strict=True)
    is_copy = any(placement.is_replicate() and idx > 0 for placement, idx in at) or any(
        idx > 0
        for name, idx in named
        if root is not mesh and name not in (mesh.mesh_dim_names or ())
    )
    held = local(one) if entries is None else entries
    return TensorSlice(held, tuple(one.shape), offsets, is_copy)


def shard_of(value: Any, like: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Returns this rank's shard of a whole tensor, on the device of `like`, without communication.

    Args:
        value: a tensor, the same on every rank; a `SavedTensor`, of which only the shard is read;
            or this rank's `TensorSlice`.
        like: a tensor with the same sharding; if it isn't sharded, all entries are returned.
        placements: the sharding, if it differs from that of `like`.
    """
    one = sharded(like)
    if isinstance(value, TensorSlice):
        return value.tensor.to(like.device)
    if one is None:
        return (value.read() if isinstance(value, SavedTensor) else value).to(like.device)
    shape, offsets = _held(value.shape, one, one.placements if placements is None else placements)
    if isinstance(value, SavedTensor):
        return value.read_slice(offsets, shape).to(like.device)
    return Box(offsets, shape).of(value).to(like.device, copy=True)


def _held(
    shape: tuple[int, ...], like: DTensor, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offsets of this rank's shard of a tensor."""
    # Private: offsets of a shard in the whole, with any mesh and placements (torch 2.13).
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    return tuple(shape), tuple(offsets)
