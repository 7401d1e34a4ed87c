"""A digest of weights: the same on any device, and however they are spread over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.training.tensor_slices import TensorSlice

# Odd numbers of 64 bits, as signed ones: those of SplitMix64, Steele et al. 2014.
_FIRST = 0x9E3779B97F4A7C15 - 2**64
_SECOND = 0xBF58476D1CE4E5B9 - 2**64
# Entries at a time: on the host few enough to stay in its cache.
_ON_HOST = 2**15
_ON_DEVICE = 2**24
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]]) -> str:
    """Returns one digest of weights; takes what `digests_of` does."""
    return merged(digests_of(weights, all_gather))


def merged(digests: Mapping[str, str]) -> str:
    """Returns one digest of several by name."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def digests_of(
    weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]]
) -> dict[str, str]:
    """Returns digests of shapes, types and bits by name; they aren't safe against forgery.

    Collective: every rank must call it. Of whole tensors those of rank 0 count, of slices those of all
    ranks. Waits for the device.

    Args:
        weights: tensors or a `TensorSlice` of each; other values don't count.
        all_gather: returns what each rank gave.
    """
    sums: dict[str, tuple[str, bool, int]] = {}
    for name, one in weights.items():
        is_slice = isinstance(one, TensorSlice)
        tensor = one.tensor if is_slice else one
        if isinstance(tensor, Tensor):
            about = f"{tensor.dtype} {list(one.shape)}"
            offsets = one.offsets if is_slice else (0,) * tensor.ndim
            is_copy = is_slice and one.is_copy
            total = 0 if is_copy else _sum_of(tensor, tuple(one.shape), offsets)
            sums[name] = (about, is_slice, total)
    first, *others = all_gather(sums)
    return {
        name: f"{about} {(total + sum(one[name][2] for one in others if is_slice)) % 2**64:x}"
        for name, (about, is_slice, total) in first.items()
    }


def _sum_of(tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Returns the sum of a hash of each entry, of its bits and its place in the whole tensor."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        shape = (*shape, 2)
        offsets = (*offsets, 0)
    if tuple(tensor.shape[1:]) == tuple(shape[1:]):  # rows, which follow each other in the whole
        start = offsets[0] * tensor[:1].numel() if tensor.ndim else 0
        tensor = tensor.reshape(-1)
        shape = (0,)
        offsets = (start,)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    most = _ON_HOST if tensor.is_cpu else _ON_DEVICE
    num_rows = max(1, most // max(1, tensor[:1].numel()))
    for row in range(0, len(tensor), num_rows):
        part = tensor[row : row + num_rows].contiguous()
        begins = (offsets[0] + row, *offsets[1:])
        hashed = _places(part, shape, begins).mul_(_FIRST)
        hashed += part.view(_INTEGERS[part.element_size()])
        hashed *= _SECOND
        hashed ^= hashed >> 32
        hashed *= _FIRST
        hashed ^= hashed >> 29
        total += hashed.sum()
    return int(total)


def _places(part: Tensor, shape: tuple[int, ...], begins: tuple[int, ...]) -> Tensor:
    """Returns the index of each entry in the whole tensor, laid out flat."""
    indices = torch.zeros((), dtype=torch.int64, device=part.device)
    for size, begin, num in zip(part.shape, begins, shape, strict=True):
        entries = torch.arange(begin, begin + size, device=part.device)
        indices = entries if indices.ndim == 0 else indices.unsqueeze(-1) * num + entries
    return indices
