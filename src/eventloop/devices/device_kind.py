"""What a device can do that a run asks for: the CPU, CUDA's and ROCm's GPUs, and the other accelerators that torch knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor


class DeviceKind:
    """What a device can do. This class is the CPU; accelerators override what they do otherwise.

    Args:
        device: the device.

    Attributes:
        is_host: whether tensors on the device are in the host's memory.
        fuses_optimizers: whether an optimizer with `fused=True` is faster.
        has_sync_batch_norm: whether torch's `SyncBatchNorm` runs on it.
    """

    fuses_optimizers: ClassVar[bool] = False
    has_sync_batch_norm: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"

    @property
    def streams(self) -> Any:
        """Torch's module with the device's streams and events; None where copies wait."""
        return None

    @cached_property
    def tensor_class(self) -> type[Tensor]:
        """The class of plain tensors on the device, which may be implemented in Python."""
        return type(torch.empty(0, device=self.device))

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which losses and metrics are added up on the device."""
        return torch.float64

    def describe(self) -> str:
        """Returns its name for the header, and what else is worth knowing."""
        threads = torch.get_num_threads()
        name = torch.backends.cpu.get_cpu_capability()
        return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"

    def select(self) -> None:
        """Makes it the device that torch uses where a type alone is given."""

    def is_opened(self) -> bool:
        """Returns whether this process has used the device."""
        return True

    def host_copy(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Starts to copy a tensor to the host; read it after an event recorded behind it.

        Args:
            tensor: any shape and dtype.
            buffer: where to copy to, if shape and dtype fit: what the last call returned.

        Returns:
            A tensor on the host that shares no memory with `tensor`.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def record(self, *, timed: bool = False) -> torch.Event | None:
        """Returns an event behind what the current stream has to do; None: all is done already.

        Args:
            timed: whether its `elapsed_time` is asked for.
        """
        return None

    def get_rng_state(self) -> Tensor | None:
        """Returns the state of the device's own random generator; None if it is the host's."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Restores what `get_rng_state` returned."""

    def release_memory(self) -> None:
        """Releases memory that torch holds for later use."""

    def memory(self) -> dict[str, int]:
        """Returns the bytes `allocated`, `reserved` and at the `peak`; {} where torch doesn't count.

        It reads torch's own books, and doesn't wait for the device.
        """
        return {}

    def best_precision(self) -> str:
        """Returns what `precision=auto` means."""
        return "fp32"  # bf16 is emulated on most hosts: slower, and no less memory

    def why_not(self, precision: str) -> str:
        """Returns why the device can't compute in a precision; "" if it can."""
        if precision == "tf32":
            return f"TF32 is a unit of NVIDIA GPUs, and the device is {self.device}"
        if precision in ("bf16", "fp16") and not torch.amp.is_autocast_available(self.device.type):
            return f"torch has no autocast for {self.device.type}"
        return ""

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        """Sets for the whole process how products of float32 are computed, within a block."""
        yield


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


class Cuda(Accelerator):
    """A GPU of torch's type `cuda`."""

    fuses_optimizers: ClassVar[bool] = True

    def best_precision(self) -> str:
        return "bf16" if _has_bf16() else "fp16"

    def why_not(self, precision: str) -> str:
        is_new = torch.cuda.get_device_capability(self.device) >= (8, 0)
        lacks = (precision == "tf32" and not is_new) or (precision == "bf16" and not _has_bf16())
        return f"{torch.cuda.get_device_name(self.device)} doesn't have it" if lacks else ""

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        saved = _Saved()
        try:
            # The older of torch's two interfaces: who reads by either then finds an answer, while
            # the older one raises where the newer one has set something else (torch 2.13).
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
            yield
        finally:
            saved.put_back()


class _Saved:
    """The process's precision of float32 products, saved to be restored."""

    def __init__(self) -> None:
        backends = torch.backends
        holders: tuple[Any, ...] = (
            backends.cuda.matmul,
            backends.cudnn.conv,  # type: ignore[attr-defined]
            backends.cudnn.rnn,
            backends.mkldnn.matmul,  # type: ignore[attr-defined]
        )
        self._exact = [(one, one.fp32_precision) for one in holders]
        try:
            self._older = (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32)
        except RuntimeError:  # it was set through the newer interface alone
            self._older = ("highest", True)

    def put_back(self) -> None:
        torch.set_float32_matmul_precision(self._older[0])
        torch.backends.cudnn.allow_tf32 = self._older[1]
        for holder, precision in self._exact:
            holder.fp32_precision = precision


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
