"""A copy of a checkpoint's tensors on the host, taken without a wait, into memory that is reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """Copies nests of tensors to the host; the next copy goes into the memory of the one before.

    From a GPU the copies are under way when `take` returns: `wait` before they are read.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the nest with copies in the place of its tensors.

        The copies of the call before are written over.
        """
        self._used: set[tuple[object, ...]] = set()
        self._copied = None
        taken = {name: self._copy((name,), value) for name, value in parts.items()}
        self._buffers = {path: self._buffers[path] for path in self._used}
        return taken

    def wait(self) -> None:
        """Waits until the copies are there; from another thread, too."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, path: tuple[object, ...], value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(path, value.detach())
        if isinstance(value, Mapping):
            return {key: self._copy((*path, key), one) for key, one in value.items()}
        if isinstance(value, list):
            return [self._copy((*path, idx), one) for idx, one in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(self._copy((*path, idx), one) for idx, one in enumerate(value))
        return value

    def _copy_tensor(self, path: tuple[object, ...], tensor: Tensor) -> Tensor:
        self._used.add(path)
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            on_gpu = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            self._buffers[path] = buffer
        buffer.copy_(tensor, non_blocking=True)
        if tensor.device.type == "cuda":
            if self._copied is None:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))
        return buffer
