"""A digest of weights that doesn't depend on the device or on how weights are sharded over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from eventloop.training.tensor_slices import TensorSlice

# Odd 64-bit multipliers of SplitMix64 (Steele et al. 2014), as signed integers.
_MULTIPLIER_A = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_B = 0xBF58476D1CE4E5B9 - 2**64
# Entries that are hashed at once. On the host, they fit into the cache.
_CHUNK_ON_HOST = 2**15
_CHUNK_ON_DEVICE = 2**24
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]]) -> str:
    """Returns a single digest of weights; see `digests_of` for the arguments."""
    return merged(digests_of(weights, all_gather))


def merged(digests: Mapping[str, str]) -> str:
    """Returns a single digest of digests by name."""
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def digests_of(
    weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]]
) -> dict[str, str]:
    """Returns a digest of shape, dtype and bits of each tensor, by name; not safe against forgery.

    Collective: every rank must call it. For whole tensors, rank 0's entries count, for slices, those
    of all ranks. Waits for the device.

    Args:
        weights: tensors, or a `TensorSlice` of each; other values are ignored.
        all_gather: returns the values of all ranks.
    """
    sums: dict[str, tuple[str, bool, int]] = {}
    for name, value in weights.items():
        is_slice = isinstance(value, TensorSlice)
        tensor = value.tensor if is_slice else value
        if isinstance(tensor, Tensor):
            description = f"{tensor.dtype} {list(value.shape)}"
            offsets = value.offsets if is_slice else (0,) * tensor.ndim
            is_copy = is_slice and value.is_copy
            total = 0 if is_copy else _sum_of(tensor, tuple(value.shape), offsets)
            sums[name] = (description, is_slice, total)
    sums_of_ranks = all_gather(sums)
    digests = {}
    for name, (description, is_slice, total) in sums_of_ranks[0].items():
        if is_slice:
            total = sum(rank_sums[name][2] for rank_sums in sums_of_ranks)
        digests[name] = f"{description} {total % 2**64:x}"
    return digests


def _sum_of(tensor: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
    """Returns the sum of a hash of each entry, computed from its bits and its index in the whole tensor.

    A sum doesn't depend on the order, so ranks can hash their slices separately.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        shape = (*shape, 2)
        offsets = (*offsets, 0)
    if tuple(tensor.shape[1:]) == tuple(shape[1:]):  # rows, contiguous in the whole tensor
        start = offsets[0] * tensor[:1].numel() if tensor.ndim else 0
        tensor = tensor.reshape(-1)
        shape = (0,)
        offsets = (start,)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    chunk_size = _CHUNK_ON_HOST if tensor.is_cpu else _CHUNK_ON_DEVICE
    num_rows = max(1, chunk_size // max(1, tensor[:1].numel()))
    for row in range(0, len(tensor), num_rows):
        chunk = tensor[row : row + num_rows].contiguous()
        chunk_offsets = (offsets[0] + row, *offsets[1:])
        hashed = _flat_indices(chunk, shape, chunk_offsets).mul_(_MULTIPLIER_A)
        hashed += chunk.view(_INTEGERS[chunk.element_size()])
        hashed *= _MULTIPLIER_B
        hashed ^= hashed >> 32
        hashed *= _MULTIPLIER_A
        hashed ^= hashed >> 29
        total += hashed.sum()
    return int(total)


def _flat_indices(chunk: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
    """Returns the index of each entry in the flattened whole tensor, in the shape of the chunk."""
    indices = torch.zeros((), dtype=torch.int64, device=chunk.device)
    for size, offset, num in zip(chunk.shape, offsets, shape, strict=True):
        entries = torch.arange(offset, offset + size, device=chunk.device)
        indices = entries if indices.ndim == 0 else indices.unsqueeze(-1) * num + entries
    return indices
