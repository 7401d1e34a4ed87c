"""Reorders documents that are packed into a sequence.

Documents of a pack are separated by `position_ids`, which begin at 0 in each. Their order must not
matter: no token attends to another document, and none is predicted from another.
"""

# B = batch, T = position

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_POSITIONS = "position_ids"


class NotPackedError(ValueError):
    """A batch isn't one of packed documents, or they can't be ordered otherwise."""


@dataclass(frozen=True)
class Pack:
    """A batch of packed documents.

    Args:
        batch: a batch of the data loader.
        order: source position of each position in the reversed pack, shape (B, T).
    """

    batch: Mapping[str, Any]
    order: Tensor

    @classmethod
    def of(cls, batch: Any) -> Pack:
        """Finds the documents of a batch.

        Raises:
            NotPackedError: there are none, or another tensor of the batch can't be reordered with them.
        """
        positions_BT = batch.get(_POSITIONS) if isinstance(batch, Mapping) else None
        if not isinstance(positions_BT, Tensor) or positions_BT.ndim != 2:
            raise NotPackedError("it isn't one of packed documents: no position_ids")
        mask = batch.get("attention_mask")
        if isinstance(mask, Tensor) and not mask.bool().all():
            raise NotPackedError("its sequences are padded")
        starts_BT = positions_BT == 0
        starts_BT[:, 0] = True
        if int(starts_BT.sum(1).max()) < 2:
            raise NotPackedError("each of its sequences is one document")
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.ndim and value.shape[:2] != positions_BT.shape:
                raise NotPackedError(f"it has {name!r}, of which the order isn't known")
        order_BT = torch.stack([_reversed(row) for row in starts_BT])
        return cls(batch, order_BT)

    def reversed(self) -> dict[str, Any]:
        """Returns the batch with the documents of each pack in reversed order."""
        return {name: self._picked(value, self.order) for name, value in self.batch.items()}

    def restored(self, rows: list[Tensor]) -> list[Tensor]:
        """Reorders values at the positions of reversed packs into the original order."""
        inverse_BT = self.order.argsort(1).cpu()
        return [
            row[inverse] if len(row) == len(inverse) else row
            for row, inverse in zip(rows, inverse_BT, strict=True)
        ]

    @staticmethod
    def _picked(value: Any, order_BT: Tensor) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        rows_B1 = torch.arange(len(value), device=value.device)[:, None]
        return value[rows_B1, order_BT.to(value.device)]


def _reversed(starts_T: Tensor) -> Tensor:
    """Returns the positions of a pack, the last document first."""
    cuts = starts_T.nonzero().flatten()[1:].tolist()
    documents = torch.arange(len(starts_T), device=starts_T.device).tensor_split(cuts)
    return torch.cat(documents[::-1])
