"""What each kind of device can do: the CPU, CUDA (which is also ROCm), and torch's other accelerators.

No other module of eventloop or of its packages names a type of device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import distributed as dist

from eventloop.devices.device_kind import Accelerator, Cuda, DeviceKind
from eventloop.errors import SettingError

__all__ = ["DeviceKind", "choose_device", "collective_backends", "kind_of", "opened_accelerator"]


@cache
def kind_of(device: torch.device) -> DeviceKind:
    """Returns what a device can do."""
    if device.type in ("cpu", "meta"):
        return DeviceKind(device)
    return (Cuda if device.type == "cuda" else Accelerator)(device)


def opened_accelerator() -> DeviceKind | None:
    """Returns the current accelerator's kind if this process has used it already, else None."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not (kind := kind_of(accelerator)).is_opened():
        return None
    return kind


def choose_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of this process, and selects it.

    Args:
        name: as torch names it: cpu, cuda, cuda:1, xpu, mps, ...; a type alone is the device of
            this process among those of the type. auto: torch's accelerator, or the CPU.
        local_rank: the number of this process on its machine.

    Raises:
        SettingError: there is none such.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if found is None else found.type
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "meta") and device.index is None:
            device = torch.device(device.type, local_rank)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(
            f"device={name!r} can't be used: {reason}", fix="set device to auto or cpu"
        ) from error
    kind_of(device).select()
    return device


def collective_backends() -> str:
    """Returns the backends of torch.distributed for the tensors of the host and the accelerator."""
    if (found := torch.accelerator.current_accelerator(check_available=True)) is None:
        return "gloo"
    return f"cpu:gloo,{found.type}:{dist.get_default_backend_for_device(found)}"
