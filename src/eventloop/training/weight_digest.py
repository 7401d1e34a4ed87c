"""A digest of weights: the same on any device, and however they are spread over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.training.tensor_slices import TensorSlice

# Odd numbers of 64 bits, as signed ones: those of SplitMix64, Steele et al. 2014.
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
_CHUNK = 2**18
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]]) -> str:
    """Returns a digest of names, shapes, types and bits; it is not safe against forgery.

    Collective: every rank must call it. Of whole tensors those of rank 0 count, of slices those of all
    ranks. Waits for the device.

    Args:
        weights: tensors or a `TensorSlice` of each; other values don't count.
        all_gather: returns what each rank gave.
    """
    sums: dict[str, int] = {}
    described: list[list[Any]] = []
    for name, one in weights.items():
        if isinstance(one, TensorSlice):
            sums[name] = 0 if one.is_copy else _sum_of(one.tensor, one.shape, one.offsets)
        elif isinstance(one, Tensor):
            sums[name] = _sum_of(one, tuple(one.shape), (0,) * one.ndim)
    of_ranks = all_gather(sums)
    for name in sorted(of_ranks[0]):
        one = weights[name]
        is_slice = isinstance(one, TensorSlice)
        total = sum(each[name] for each in of_ranks) if is_slice else of_ranks[0][name]
        dtype = one.tensor.dtype if is_slice else one.dtype
        described.append([name, list(one.shape), str(dtype), total % 2**64])
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _sum_of(tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Returns the sum of a hash of each entry's bits and its place in the whole tensor."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor, shape, offsets = torch.view_as_real(tensor), (*shape, 2), (*offsets, 0)
    if tuple(tensor.shape[1:]) == tuple(shape[1:]):  # rows, which follow each other in the whole
        start = offsets[0] * tensor[:1].numel() if tensor.ndim else 0
        tensor, shape, offsets = tensor.reshape(-1), (0,), (start,)
    total, num_rows = 0, max(1, _CHUNK // max(1, tensor[:1].numel()))
    for row in range(0, len(tensor), num_rows):
        part = tensor[row : row + num_rows].contiguous()
        places = torch.zeros((), dtype=torch.int64, device=part.device)
        begins = (offsets[0] + row, *offsets[1:])
        for size, begin, num in zip(part.shape, begins, shape, strict=True):
            entries = torch.arange(begin, begin + size, device=part.device)
            places = places.unsqueeze(-1) * num + entries
        bits = part.view(_INTEGERS[part.element_size()])
        mixed = (places * _FIRST + bits) * _SECOND
        mixed ^= mixed >> 32
        mixed *= _FIRST
        mixed ^= mixed >> 29
        total += int(mixed.sum())
    return total
