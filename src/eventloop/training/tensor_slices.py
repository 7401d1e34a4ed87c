"""Slices of tensors that are sharded over ranks: a rank's part, and its offsets in the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What a rank holds of a tensor that is spread over ranks.

    Each entry of the whole is in the slice of one rank, but for copies. A rank that holds none has an
    empty slice.

    Args:
        tensor: the entries.
        shape: of the whole.
        offsets: the index of the first entry in the whole tensor, one number per dimension.
        is_copy: whether another rank's slice has the same entries, so that this one isn't saved.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_copy: bool = False

    def put_into(self, whole: Tensor) -> None:
        """Copies the entries to their place."""
        target = whole
        for dim, (start, length) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            target = target.narrow(dim, start if length else 0, length)
        target.copy_(self.tensor)


def holds_slices(weights: Mapping[str, Any]) -> bool:
    """Returns whether a flat dict has slices; then each rank's has."""
    return any(isinstance(one, TensorSlice) for one in weights.values())


def held(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that this rank holds of a flat dict, as plain tensors."""
    return {
        name: one.tensor if isinstance(one, TensorSlice) else one for name, one in weights.items()
    }
