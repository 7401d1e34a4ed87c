"""Sharded tensors (DTensors) and plain tensors: local shards, slices, gathered tensors, norms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from eventloop.training.tensor_slices import TensorSlice

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def sharded(value: Any) -> DTensor | None:
    """Returns the value if it is a sharded tensor, otherwise None."""
    # Importing this module takes a second. If it isn't imported yet, no tensor is sharded.
    module = sys.modules.get("torch.distributed.tensor")
    return value if module is not None and isinstance(value, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, detached, sharing its memory."""
    dtensor = sharded(tensor)
    return tensor.detach() if dtensor is None else dtensor.to_local().detach()


def indices_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """Returns name and this rank's index for each mesh dimension that a tensor is sharded over."""
    dtensor = sharded(tensor)
    if dtensor is None:
        return ()
    mesh = dtensor.device_mesh
    names = mesh.mesh_dim_names or [*map(str, range(mesh.ndim))]
    coordinates = zip(names, dtensor.placements, mesh.get_coordinate() or (), strict=True)
    return tuple(
        (name, idx) for name, placement, idx in coordinates if not placement.is_replicate()
    )


def groups_of(tensor: Tensor, dims: Collection[int] | None = None) -> tuple[Any, ...]:
    """Returns the process groups that a tensor is sharded over; () for a plain tensor.

    Args:
        dims: only groups that share these dimensions of the tensor; None for all.

    Raises:
        TypeError: a placement is Partial.
    """
    dtensor = sharded(tensor)
    if dtensor is None:
        return ()
    placements: list[Any] = list(dtensor.placements)
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            "a tensor whose placement is Partial has no norm: it isn't summed over ranks yet"
        )
    groups = []
    for idx, placement in enumerate(placements):
        if not placement.is_replicate() and (dims is None or placement.dim in dims):
            groups.append(dtensor.device_mesh.get_group(idx))
    return tuple(groups)


def sum_over_(values: Sequence[Tensor], groups: Sequence[tuple[Any, ...]]) -> None:
    """Sums each value over its groups, in place, with one all-reduce for all values of a group."""
    for group in dict.fromkeys(chain(*groups)):
        values_of_group = []
        for value, groups_of_value in zip(values, groups, strict=True):
            if group in groups_of_value:
                values_of_group.append(value)
        flat = torch.cat([value.reshape(-1) for value in values_of_group])
        dist.all_reduce(flat, group=group)
        totals = torch.split(flat, [value.numel() for value in values_of_group])
        for value, total in zip(values_of_group, totals, strict=True):
            value.copy_(total.view_as(value))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of all entries, shape (), without waiting for the device.

    Equals torch's `get_total_norm` for plain tensors. Each entry of a sharded tensor counts once.
    Collective if tensors are sharded: an all-reduce for each dimension of the mesh.
    """
    shards_by_groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        shards_by_groups.setdefault(groups_of(tensor), []).append(local(tensor))
    if not any(shards_by_groups):
        # Only plain tensors: squaring and summing would change the last bits of torch's result.
        return get_total_norm(shards_by_groups.get((), []))
    norms = [get_total_norm(shards) for shards in shards_by_groups.values()]
    squares = [norm.to(torch.promote_types(norm.dtype, torch.float32)).square() for norm in norms]
    sum_over_(squares, list(shards_by_groups))
    return torch.stack(squares).sum().sqrt()


def slice_of(value: Any, entries: Tensor | None = None) -> Any:
    """Returns this rank's slice of a sharded tensor, for a checkpoint.

    Args:
        value: anything but a sharded tensor is returned unchanged.
        entries: used instead of this rank's shard.
    """
    dtensor = sharded(value)
    if dtensor is None:
        return value if entries is None else entries
    mesh = dtensor.device_mesh
    coordinates = zip(dtensor.placements, mesh.get_coordinate() or (), strict=True)
    # Of ranks with the same entries, only the rank with index 0 along each such dimension saves them.
    replica_indices = [idx for placement, idx in coordinates if placement.is_replicate()]
    # Private: the mesh of the whole run; along its other dimensions, all ranks have the same entries
    # (torch 2.13).
    root = mesh._get_root_mesh()
    mesh_dims = mesh.mesh_dim_names or ()
    root_coordinates = zip(root.mesh_dim_names or (), root.get_coordinate() or (), strict=False)
    replica_indices += [idx for name, idx in root_coordinates if name not in mesh_dims]
    _, offsets = shape_and_offsets(dtensor.shape, dtensor, dtensor.placements)
    tensor = local(dtensor) if entries is None else entries
    return TensorSlice(tensor, tuple(dtensor.shape), offsets, is_copy=any(replica_indices))


def shape_and_offsets(
    shape: tuple[int, ...], like: DTensor, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offsets of this rank's shard of a tensor.

    Args:
        shape: the shape of the whole tensor.
        like: provides the device mesh.
    """
    # Private: computes a shard's offsets in the whole for any mesh and placements (torch 2.13).
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local_shape, offsets = compute_local_shape_and_global_offset(
        shape, like.device_mesh, placements
    )
    return tuple(local_shape), tuple(offsets)


def sliced(nest: Any) -> Any:
    """Returns a copy of nested dicts with this rank's slices instead of sharded tensors."""
    if isinstance(nest, dict):
        return {key: sliced(value) for key, value in nest.items()}
    return slice_of(nest)


def gathered(
    nest: Mapping[str, Any], all_gather: Callable[[Any], list[Any]], *, keep: bool
) -> dict[str, Any]:
    """Returns nested values with whole tensors on the host instead of slices.

    Collective: every rank must call it.

    Args:
        nest: the same on all ranks, except for the entries of the slices.
        all_gather: returns the values of all ranks, at least on ranks with `keep`.
        keep: whether this rank needs the result; otherwise it only takes part and gets {}.
    """

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: gather(child) for key, child in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(gather(child) for child in value)
        if not isinstance(value, TensorSlice):
            return value
        # One tensor at a time, so that at most one is in memory a second time.
        local_slice = TensorSlice(value.tensor.detach().cpu(), value.shape, value.offsets)
        slices = all_gather(local_slice)
        if not keep:
            return None
        tensor = local_slice.tensor.new_empty(local_slice.shape)
        for tensor_slice in slices:
            tensor_slice.put_into(tensor)
        return tensor

    result: dict[str, Any] = gather(nest)
    return result if keep else {}
