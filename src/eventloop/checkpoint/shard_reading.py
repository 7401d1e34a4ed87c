"""A rank's shards of whole tensors, of saved ones and of slices; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop.checkpoint.safetensors_files import Box
from eventloop.checkpoint.saved_tensors import SavedTensor
from eventloop.training.sharded_tensors import shape_and_offsets, sharded
from eventloop.training.tensor_slices import TensorSlice


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
    spread = one.placements if placements is None else placements
    shape, offsets = shape_and_offsets(value.shape, one, spread)
    if isinstance(value, SavedTensor):
        return value.read_slice(offsets, shape).to(like.device)
    return Box(offsets, shape).of(value).to(like.device, copy=True)


def shards_like(value: Any, like: Any) -> Any:
    """Returns a whole tensor as a DTensor that is sharded as another is, on its device.

    One of another shape is whole on every rank. What is sharded already stays what it is, and so does a
    tensor where `like` is a plain one; a saved tensor is read.
    """
    one = sharded(like)
    if one is None or not isinstance(value, Tensor | SavedTensor | TensorSlice) or not value.shape:
        return value.read() if isinstance(value, SavedTensor) else value
    if sharded(value) is not None:
        return value
    from torch.distributed.tensor import DTensor, Replicate

    shape = torch.Size(value.shape)
    is_alike = shape == one.shape
    placements = one.placements if is_alike else [Replicate()] * one.device_mesh.ndim
    entries, strides = shard_of(value, one, placements), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        entries, one.device_mesh, placements, run_check=False, shape=shape, stride=strides
    )
