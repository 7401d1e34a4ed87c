"""What a device can do that a run asks for; here, what the CPU can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

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
        self.device, self.is_host = device, device.type == "cpu"

    @property
    def streams(self) -> Any:
        """Torch's module with the device's streams and events; None where copies wait."""
        return None

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
