"""Slices of tensors that are sharded over ranks: a rank's entries, and their offsets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rank's slice of a tensor that is sharded over ranks.

    Without copies, each entry of the whole tensor is in exactly one rank's slice. The slice of a rank
    without entries is empty.

    Args:
        tensor: the entries of the slice.
        shape: the shape of the whole tensor.
        offsets: the index of the first entry in the whole tensor, a number for each dimension.
        is_copy: whether another rank's slice has the same entries, so this slice isn't saved.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_copy: bool = False

    def put_into(self, whole_tensor: Tensor) -> None:
        """Copies the entries to their offsets in the whole tensor."""
        target = whole_tensor
        for dim, (start, length) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            target = target.narrow(dim, start if length else 0, length)
        target.copy_(self.tensor)


def holds_slices(weights: Mapping[str, Any]) -> bool:
    """Returns whether a flat dict contains slices; the answer is the same on all ranks."""
    return any(isinstance(value, TensorSlice) for value in weights.values())


def held(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a flat dict with the plain tensors of this rank's slices."""
    return {
        name: value.tensor if isinstance(value, TensorSlice) else value
        for name, value in weights.items()
    }
