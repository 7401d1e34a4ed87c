"""What an accelerator of torch can do: Intel's and Apple's GPUs, and those of other packages."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from eventloop.devices.device_kind import DeviceKind

_OF_STREAMS = ("Stream", "Event", "stream", "current_stream")


class Accelerator(DeviceKind):
    """A device with memory of its own, by the module that torch has for its type.

    Where the module has no streams, or the host no pinned memory for it, copies wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)
        self.has_sync_batch_norm = device.type in ("cuda", "xpu")

    @cached_property  # the answer opens the device
    def streams(self) -> Any:
        has_all = all(hasattr(self.module, name) for name in _OF_STREAMS)
        return self.module if has_all and _can_pin() else None

    @cached_property
    def sum_dtype(self) -> torch.dtype:
        has_float64 = _has(torch.float64, self.device)  # Apple's GPUs don't
        return torch.float64 if has_float64 else torch.float32

    def describe(self) -> str:
        named = getattr(self.module, "get_device_name", None)
        words = [str(named(self.device))] if named else []
        if self.streams is None:
            words.append("copies wait: torch has no streams or no pinned memory for it")
        if self.sum_dtype is not torch.float64:
            words.append("sums in float32: it has no float64")
        return "; ".join(words)

    def select(self) -> None:
        if hasattr(self.module, "set_device"):
            self.module.set_device(self.device)

    def is_opened(self) -> bool:
        is_initialized = getattr(self.module, "is_initialized", torch.accelerator.is_available)
        return bool(is_initialized())

    def host_copy(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        if self.streams is None:
            return super().host_copy(tensor)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return buffer.copy_(tensor, non_blocking=True)

    def record(self, *, timed: bool = False) -> torch.Event | None:
        if self.streams is None:
            return None
        event = self.streams.Event(enable_timing=timed)
        event.record(self.streams.current_stream(self.device))
        return cast("torch.Event", event)

    def get_rng_state(self) -> Tensor | None:
        return cast("Tensor", self.module.get_rng_state(self.device))

    def set_rng_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state, self.device)

    def release_memory(self) -> None:
        self.module.empty_cache()

    def memory(self) -> dict[str, int]:
        names = {
            "allocated": "memory_allocated",
            "reserved": "memory_reserved",
            "peak": "max_memory_allocated",
        }
        if not all(hasattr(self.module, one) for one in names.values()):
            return {}
        return {name: getattr(self.module, one)(self.device) for name, one in names.items()}

    def best_precision(self) -> str:
        has_bf16 = getattr(self.module, "is_bf16_supported", None)
        return "bf16" if has_bf16 and has_bf16() else "fp32"


def _can_pin() -> bool:
    """Returns whether the host has memory from which the accelerator copies without a wait."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def _has(dtype: torch.dtype, device: torch.device) -> bool:
    try:
        torch.empty(0, dtype=dtype, device=device)
    except (TypeError, RuntimeError):
        return False
    return True
