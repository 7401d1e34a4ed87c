"""Tensors in checkpoints: their values and memory formats, and tensors and arrays that share memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop.devices import kind_of
from eventloop.errors import a
from eventloop.object_state.entering import is_array
from eventloop.object_state.not_savable import NotSavableError

# A larger value is probably data or a cache, and would be written with every checkpoint.
MAX_BYTES = 64 * 1024**2


def encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """Returns a copy of a tensor, with its memory format.

    Raises:
        NotSavableError: the tensor isn't dense, is sharded over ranks, or is too large.
    """
    if not is_plain_tensor(tensor):
        raise NotSavableError(f"it holds {a(type(tensor).__name__)} of {tensor.layout}")
    if tensor.nbytes > MAX_BYTES:
        size = tensor.nbytes // 1024**2
        limit = MAX_BYTES // 1024**2
        raise NotSavableError(f"it is a tensor of {size:,} MiB, and at most {limit} are saved")
    return {
        "kind": "tensor",
        "values": tensor.detach().clone(),
        "strides": list(tensor.stride()),
        "is_on_host": kind_of(tensor.device).is_host,
        "requires_grad": tensor.requires_grad and tensor.is_leaf,
    }


def new_tensor(nest: Mapping[str, Any], device: torch.device) -> Tensor:
    """Returns a new tensor with saved values.

    Args:
        device: the device for a tensor that wasn't on the host.
    """
    device = torch.device("cpu") if nest["is_on_host"] else device
    tensor = laid_out(nest["values"], nest["strides"], device)
    return tensor.requires_grad_(bool(nest["requires_grad"]))


def fill_tensor(tensor: Tensor, nest: Mapping[str, Any]) -> None:
    """Copies saved values into a tensor."""
    values: Tensor = nest["values"]
    strides = tuple(nest["strides"])
    is_alike = tensor.shape == values.shape and tensor.dtype == values.dtype
    if is_alike and tensor.stride() == strides and 0 not in strides:
        tensor.detach().copy_(values)
    else:  # the tensor is expanded, or the run had changed it by assigning `tensor.data`
        tensor.data = laid_out(values, strides, tensor.device)


def laid_out(values: Tensor, strides: Sequence[int], device: torch.device) -> Tensor:
    """Returns a copy of a tensor with these strides; contiguous if entries would share memory.

    Raises:
        ValueError: the strides don't fit the shape.
    """
    if len(strides) != values.ndim or any(stride < 0 for stride in strides):
        raise ValueError(f"{strides} aren't strides of a tensor of shape {tuple(values.shape)}")
    # The strides come from a file, so check that no two entries have the same address.
    order = sorted(range(values.ndim), key=lambda dim: (strides[dim], values.shape[dim]))
    num_entries = 1
    for dim in order:
        if values.shape[dim] > 1 and strides[dim] != num_entries:
            return values.to(device, copy=True).contiguous()
        num_entries *= values.shape[dim]
    tensor = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=device)
    return tensor.copy_(values)


def is_plain_tensor(tensor: Tensor) -> bool:
    """Returns whether a tensor is dense, with all its values in memory on this rank."""
    if not _has_plain_memory(tensor):
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


def _has_plain_memory(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter, kind_of(tensor.device).tensor_class)
    return is_plain and tensor.layout is torch.strided


def encode_view(view: Any, base: Any) -> dict[str, Any]:
    """Returns the nest of a view: its shape, strides and offset in the memory of the base tensor.

    Args:
        base: the nest of the base tensor.
    """
    if not isinstance(view, Tensor):
        raise NotSavableError("it shares the memory of another array or tensor")
    return {
        "kind": "view",
        "of": base,
        "shape": list(view.shape),
        "strides": list(view.stride()),
        "offset": view.storage_offset(),
    }


def new_view(nest: Mapping[str, Any], base: Any) -> Tensor:
    """Returns a tensor that is a view of the base tensor's memory.

    Raises:
        RuntimeError: the view would exceed the memory.
    """
    if not isinstance(base, Tensor) or not _has_plain_memory(base):
        raise NotSavableError(f"a view of {a(type(base).__name__)} isn't saved")
    sizes = map(operator.index, nest["shape"])
    strides = map(operator.index, nest["strides"])
    return _whole_memory(base).as_strided([*sizes], [*strides], operator.index(nest["offset"]))


def _whole_memory(tensor: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage())


class SharedMemory:
    """Finds tensors and arrays that share memory.

    Args:
        objects: all objects in use; objects other than tensors and arrays are ignored.
        built: the objects that a new process builds again.
    """

    def __init__(self, objects: Iterable[Any], built: Iterable[Any]) -> None:
        self._objects = objects
        self._built = built
        self._groups: dict[int, list[Any]] | None = None
        self._built_ids: set[int] = set()
        self._bases: dict[int, Tensor] = {}

    def base_of(self, value: Any) -> Tensor | None:
        """Returns a tensor for the whole memory of `value` if other objects share it, else None."""
        if self._groups is None:  # computed only now, since most saves have no new tensor
            self._groups = self._grouped()
            self._built_ids = set(map(id, self._built))
        address = _address(value)
        if address is None or value is self._bases.get(address):
            return None
        group = self._groups.get(address, [])
        if all(member is value for member in group):
            return None
        if address not in self._bases:
            self._bases[address] = self._base_of_group(value, group)
        return self._bases[address]

    def _grouped(self) -> dict[int, list[Any]]:
        groups: dict[int, list[Any]] = {}
        for value in self._objects:
            if (address := _address(value)) is not None:
                groups.setdefault(address, []).append(value)
        return groups

    def _base_of_group(self, value: Any, group: list[Any]) -> Tensor:
        if not all(isinstance(member, Tensor) and member.dtype == value.dtype for member in group):
            raise NotSavableError("it shares the memory of an array or tensor of another kind")
        for member in group:
            if id(member) in self._built_ids:
                base: Tensor = member
                return base
        return _whole_memory(value)


def _address(value: Any) -> int | None:
    """Returns the address of the memory of a tensor or an array; None for other objects."""
    if isinstance(value, Tensor):
        return value.untyped_storage().data_ptr() or None if _has_plain_memory(value) else None
    if not is_array(value):
        return None
    while is_array(value.base):
        value = value.base
    address: int = value.__array_interface__["data"][0]
    return address if value.size else None
