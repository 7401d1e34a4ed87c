"""The operations that depend on the kind of device: CPU, CUDA and ROCm GPUs, other accelerators of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor


class DeviceKind:
    """The properties and operations of a device. This class is for the CPU; subclasses override it.

    Args:
        device: the device.

    Attributes:
        is_host: whether tensors on the device are in the host's memory.
        fuses_optimizers: whether an optimizer with `fused=True` is faster.
        has_sync_batch_norm: whether torch's `SyncBatchNorm` supports the device.
    """

    fuses_optimizers: ClassVar[bool] = False
    has_sync_batch_norm: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_host = device.type == "cpu"

    @property
    def streams(self) -> Any:
        """The torch module with the device's streams and events; None if copies wait for the device."""
        return None

    @cached_property
    def tensor_class(self) -> type[Tensor]:
        """The class of plain tensors on the device; a backend in Python may have its own class."""
        return type(torch.empty(0, device=self.device))

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which losses and metrics are summed on the device."""
        return torch.float64

    def describe(self) -> str:
        """Returns a description for the header: the name of the device, and its limitations."""
        threads = torch.get_num_threads()
        name = torch.backends.cpu.get_cpu_capability()
        return f"{name}, {threads} {'thread' if threads == 1 else 'threads'}"

    def select(self) -> None:
        """Makes this the device that torch uses for a type without an index."""

    def is_opened(self) -> bool:
        """Returns whether this process has used the device."""
        return True

    def host_copy(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Starts to copy a tensor to the host; read the copy only after a later event of `record`.

        Args:
            tensor: any shape and dtype.
            buffer: the result of an earlier call, which is used again if shape and dtype match.

        Returns:
            A tensor on the host that shares no memory with `tensor`.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    def record(self, *, timed: bool = False) -> torch.Event | None:
        """Returns an event for the work queued on the current stream; None if nothing is pending.

        Args:
            timed: whether the event must support `elapsed_time`.
        """
        return None

    def get_rng_state(self) -> Tensor | None:
        """Returns the state of the device's random generator; None if it uses the host's."""
        return None

    def set_rng_state(self, state: Tensor) -> None:
        """Restores the result of `get_rng_state`."""

    def release_memory(self) -> None:
        """Releases the unused memory in torch's cache."""

    def memory(self) -> dict[str, int]:
        """Returns the bytes `allocated`, `reserved` and at the `peak`; {} if torch doesn't count them.

        Reads counters of torch on the host, so it doesn't wait for the device.
        """
        return {}

    def best_precision(self) -> str:
        """Returns the precision that `precision=auto` selects."""
        return "fp32"  # most CPUs emulate bf16, which is slower

    def why_not(self, precision: str) -> str:
        """Returns the reason why the device doesn't support a precision; "" if it does."""
        if precision == "tf32":
            return f"only NVIDIA GPUs support TF32, and the device is {self.device}"
        if precision in ("bf16", "fp16") and not torch.amp.is_autocast_available(self.device.type):
            return f"torch has no autocast for {self.device.type}"
        return ""

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        """Sets the precision of float32 matrix products for the whole process, within the block."""
        yield


_STREAM_NAMES = ("Stream", "Event", "stream", "current_stream")


class Accelerator(DeviceKind):
    """A device with its own memory, used through the torch module of its type.

    If the module has no streams, or the host no pinned memory for it, copies wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)
        self.has_sync_batch_norm = device.type in ("cuda", "xpu")

    # Not in `__init__`, since the check for pinned memory opens the device.
    @cached_property
    def streams(self) -> Any:
        has_all = all(hasattr(self.module, name) for name in _STREAM_NAMES)
        return self.module if has_all and _can_pin() else None

    @cached_property
    def sum_dtype(self) -> torch.dtype:
        has_float64 = _supports(torch.float64, self.device)  # Apple's GPUs don't
        return torch.float64 if has_float64 else torch.float32

    def describe(self) -> str:
        get_name = getattr(self.module, "get_device_name", None)
        descriptions = [str(get_name(self.device))] if get_name else []
        if self.streams is None:
            descriptions.append("copies wait: torch has no streams or no pinned memory for it")
        if self.sum_dtype is not torch.float64:
            descriptions.append("sums in float32: it has no float64")
        return "; ".join(descriptions)

    def select(self) -> None:
        if hasattr(self.module, "set_device"):
            self.module.set_device(self.device)

    def is_opened(self) -> bool:
        # torch.mps, for example, has no `is_initialized`.
        is_initialized = getattr(self.module, "is_initialized", torch.accelerator.is_available)
        return bool(is_initialized())

    def host_copy(self, tensor: Tensor, buffer: Tensor | None = None) -> Tensor:
        if self.streams is None:
            return super().host_copy(tensor)
        # Only copies to pinned memory are asynchronous. Allocating it is slow, hence the buffer.
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
        function_names = {
            "allocated": "memory_allocated",
            "reserved": "memory_reserved",
            "peak": "max_memory_allocated",
        }
        num_bytes = {}
        for name, function_name in function_names.items():
            function = getattr(self.module, function_name, None)
            if function is None:
                return {}
            num_bytes[name] = function(self.device)
        return num_bytes

    def best_precision(self) -> str:
        has_bf16 = getattr(self.module, "is_bf16_supported", None)
        return "bf16" if has_bf16 and has_bf16() else "fp32"


def _can_pin() -> bool:
    """Returns whether the host can allocate pinned memory, which copies without waiting need."""
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (RuntimeError, NotImplementedError):
        return False


def _supports(dtype: torch.dtype, device: torch.device) -> bool:
    try:
        torch.empty(0, dtype=dtype, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


class Cuda(Accelerator):
    """A GPU of torch's device type `cuda`: NVIDIA's, or AMD's with ROCm."""

    fuses_optimizers: ClassVar[bool] = True

    def best_precision(self) -> str:
        return "bf16" if _has_bf16() else "fp16"

    def why_not(self, precision: str) -> str:
        has_tf32 = torch.cuda.get_device_capability(self.device) >= (8, 0)
        is_missing = False
        if precision == "tf32":
            is_missing = not has_tf32
        elif precision == "bf16":
            is_missing = not _has_bf16()
        return f"{torch.cuda.get_device_name(self.device)} doesn't have it" if is_missing else ""

    @contextmanager
    def float32_products(self, *, tf32: bool) -> Iterator[None]:
        previous = _Float32Products()
        try:
            # Use the older of torch's two interfaces. After that, both can be read, whereas reading
            # through the older interface raises after mixed settings with the newer (torch 2.13).
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32
            yield
        finally:
            previous.put_back()


class _Float32Products:
    """The saved settings of the process for the precision of float32 products."""

    def __init__(self) -> None:
        backends = torch.backends
        holders: tuple[Any, ...] = (
            backends.cuda.matmul,
            backends.cudnn.conv,  # type: ignore[attr-defined]
            backends.cudnn.rnn,
            backends.mkldnn.matmul,  # type: ignore[attr-defined]
        )
        self._newer_settings = [(holder, holder.fp32_precision) for holder in holders]
        try:
            self._older_settings = (
                torch.get_float32_matmul_precision(),
                backends.cudnn.allow_tf32,
            )
        except RuntimeError:  # only the newer interface was used
            self._older_settings = ("highest", True)

    def put_back(self) -> None:
        # The newer settings come last, since they are more specific and the older would change them.
        matmul_precision, allow_tf32 = self._older_settings
        torch.set_float32_matmul_precision(matmul_precision)
        torch.backends.cudnn.allow_tf32 = allow_tf32
        for holder, precision in self._newer_settings:
            holder.fp32_precision = precision


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))
