"""Sharded tensors, DTensors, beside plain ones: what a rank holds, its slices, the whole, norms."""

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
    # Sharding has imported this already; importing it takes a second, so nothing else does.
    module = sys.modules.get("torch.distributed.tensor")
    return value if module is not None and isinstance(value, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a tensor, detached, sharing its memory."""
    one = sharded(tensor)
    return tensor.detach() if one is None else one.to_local().detach()


def indices_of(tensor: Tensor) -> tuple[tuple[str, int], ...]:
    """Returns this rank's index along each dimension of the mesh that a tensor is sharded over."""
    if (one := sharded(tensor)) is None:
        return ()
    mesh = one.device_mesh
    names = mesh.mesh_dim_names or [*map(str, range(mesh.ndim))]
    at = zip(names, one.placements, mesh.get_coordinate() or (), strict=True)
    return tuple((name, idx) for name, placement, idx in at if not placement.is_replicate())


def groups_of(tensor: Tensor, dims: Collection[int] | None = None) -> tuple[Any, ...]:
    """Returns the groups of ranks that a tensor is sharded over; along some of its dimensions."""
    one = sharded(tensor)
    spread: list[Any] = [*enumerate(one.placements if one is not None else ())]
    if any(at.is_partial() for _, at in spread):
        raise TypeError("a tensor that is a sum over ranks as yet (Partial) has no norm")
    over = [idx for idx, at in spread if not at.is_replicate() and (dims is None or at.dim in dims)]
    return tuple(one.device_mesh.get_group(idx) for idx in over) if one is not None else ()


def sum_over_(values: Sequence[Tensor], groups: Sequence[tuple[Any, ...]]) -> None:
    """Adds up each value over its groups, in place; all values of a group in one all-reduce."""
    for group in dict.fromkeys(chain(*groups)):
        mine = [value for value, over in zip(values, groups, strict=True) if group in over]
        flat = torch.cat([value.reshape(-1) for value in mine])
        dist.all_reduce(flat, group=group)
        totals = torch.split(flat, [value.numel() for value in mine])
        for value, total in zip(mine, totals, strict=True):
            value.copy_(total.view_as(value))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the 2-norm of all entries, shape (), without a wait; of plain tensors it is torch's.

    Each entry of a sharded one counts once; the ranks sum once for each dimension of their mesh.
    """
    parts: dict[tuple[Any, ...], list[Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(groups_of(tensor), []).append(local(tensor))
    norms = [get_total_norm(some) for some in parts.values()] or [get_total_norm([])]
    if not any(parts):
        return norms[0]
    squares = [norm.to(torch.promote_types(norm.dtype, torch.float32)).square() for norm in norms]
    sum_over_(squares, list(parts))
    return torch.stack(squares).sum().sqrt()


def slice_of(value: Any, entries: Tensor | None = None) -> Any:
    """Returns this rank's slice of a sharded tensor, for a checkpoint.

    Args:
        value: anything but a sharded tensor is returned unchanged.
        entries: used instead of this rank's shard.
    """
    one = sharded(value)
    if one is None:
        return value if entries is None else entries
    mesh = one.device_mesh
    at = zip(one.placements, mesh.get_coordinate() or (), strict=True)
    # Private: the run's whole mesh, of whose other dimensions each index has the same (torch 2.13).
    root = mesh._get_root_mesh()
    own = mesh.mesh_dim_names or ()
    named = zip(root.mesh_dim_names or (), root.get_coordinate() or (), strict=False)
    copied = [idx for placement, idx in at if placement.is_replicate()]
    is_copy = any(copied) or any(idx for name, idx in named if name not in own)
    _, offsets = shape_and_offsets(one.shape, one, one.placements)
    held = local(one) if entries is None else entries
    return TensorSlice(held, tuple(one.shape), offsets, is_copy)


def shape_and_offsets(
    shape: tuple[int, ...], like: DTensor, placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the offsets of this rank's shard of a tensor."""
    # Private: offsets of a shard in the whole, with any mesh and placements (torch 2.13).
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = compute_local_shape_and_global_offset(shape, like.device_mesh, placements)
    return tuple(found[0]), tuple(found[1])


def sliced(nest: Any) -> Any:
    """Returns a nest of dicts with this rank's slices in the place of sharded tensors."""
    if isinstance(nest, dict):
        return {key: sliced(one) for key, one in nest.items()}
    return slice_of(nest)


def gathered(
    nest: Mapping[str, Any], all_gather: Callable[[Any], list[Any]], *, keep: bool
) -> dict[str, Any]:
    """Returns a nest with whole tensors on the host; collective: every rank must call it.

    Args:
        nest: alike on all ranks, but for the entries of the slices.
        all_gather: returns what each rank gave, at least where they are wanted.
        keep: whether this rank wants them; it gets {} otherwise, and only takes part.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: whole(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(whole(one) for one in value)
        if not isinstance(value, TensorSlice):
            return value
        mine = TensorSlice(value.tensor.detach().cpu(), value.shape, value.offsets)
        slices = all_gather(mine)  # one tensor is on the way at a time
        if not keep:
            return None
        found = mine.tensor.new_empty(mine.shape)
        for other in slices:
            other.put_into(found)
        return found

    found: dict[str, Any] = whole(nest)
    return found if keep else {}
