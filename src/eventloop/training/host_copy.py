"""Numbers on their way to the host, without a wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """A copy that has been started and may be asked for later.

    Args:
        tensors: one entry each, of any type and device, the host too; only work queued on the
            current stream may still write into them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copied: torch.cuda.Event | None = None
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if has_cuda and any(tensor.is_cuda for tensor in tensors):
            self._tensors = _started(tensors)
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


def _started(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Starts one copy a type and device; gives the tensors on the host, in order."""
    on_host = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for idx, tensor in enumerate(tensors):
        if tensor.is_cuda:
            groups.setdefault((tensor.dtype, tensor.device), []).append(idx)
    for idxs in groups.values():
        stacked = torch.stack([tensors[idx].reshape(()) for idx in idxs])
        pinned = torch.empty_like(stacked, device="cpu", pin_memory=True)
        for idx, copy in zip(idxs, pinned.copy_(stacked, non_blocking=True), strict=True):
            on_host[idx] = copy
    return on_host
