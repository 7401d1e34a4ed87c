"""Slices of tensors that are spread over ranks: what a rank holds, and where in the whole it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """What a rank holds of a tensor that is spread over ranks.

    Each entry of the whole is in the slice of one rank. A rank that holds none, or only a copy of
    what another one gives, has an empty slice.

    Args:
        tensor: the entries.
        shape: of the whole.
        offsets: where in the whole the first entry stands, one number a dimension.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    def put_into(self, whole: Tensor) -> None:
        """Copies the entries to their place."""
        place = whole
        for dim, (start, length) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            place = place.narrow(dim, start if length else 0, length)
        place.copy_(self.tensor)


def holds_slices(weights: Mapping[str, Any]) -> bool:
    """Returns whether a flat dict has slices; then each rank's has."""
    return any(isinstance(one, TensorSlice) for one in weights.values())


def held(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that this rank holds of a flat dict, as plain tensors."""
    return {
        name: one.tensor if isinstance(one, TensorSlice) else one for name, one in weights.items()
    }


def gathered(
    weights: Mapping[str, Any], all_gather: Callable[[Any], list[Any]], *, keep: bool
) -> dict[str, Any]:
    """Returns a flat dict with whole tensors on the host; collective: every rank must call it.

    Args:
        all_gather: returns what each rank gave.
        keep: whether this rank wants them; it gets {} otherwise, and only takes part.
    """
    found: dict[str, Any] = {}
    for name, one in weights.items():
        if isinstance(one, TensorSlice):
            mine = TensorSlice(one.tensor.detach().cpu(), one.shape, one.offsets)
            # One tensor is on the way at a time.
            slices = all_gather(mine)
            if keep:
                found[name] = one = mine.tensor.new_empty(mine.shape)
                for other in slices:
                    other.put_into(one)
        elif keep:
            found[name] = one
    return found
