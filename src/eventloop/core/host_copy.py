"""Numbers on their way to the host, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A copy that has been started and may be asked for later.

    Args:
        tensors: shape () each, of one device; only work queued on the current stream may still
            write into them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copied: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            stacked = torch.stack(tuple(tensors))
            pinned = torch.empty_like(stacked, device="cpu", pin_memory=True)
            self._tensors = tuple(pinned.copy_(stacked, non_blocking=True))
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def is_ready(self) -> bool:
        """Tells whether `numbers` would give its answer without a wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def numbers(self) -> list[float]:
        """Gives the numbers; waits for them where they aren't there."""
        if self._copied is not None:
            self._copied.synchronize()
        return list(map(Tensor.item, self._tensors))
