"""The kinds of devices: the CPU, CUDA (including ROCm), and torch's other accelerators.

No other module of eventloop or of its packages refers to a type of device.
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
    """Returns the `DeviceKind` of a device."""
    if device.type in ("cpu", "meta"):
        return DeviceKind(device)
    if device.type == "cuda":
        return Cuda(device)
    return Accelerator(device)


def opened_accelerator() -> DeviceKind | None:
    """Returns the kind of the current accelerator if this process has used it already, else None."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    kind = kind_of(accelerator)
    return kind if kind.is_opened() else None


def choose_device(name: str, local_rank: int) -> torch.device:
    """Returns the device of this process, and selects it.

    Args:
        name: torch's name of the device: cpu, cuda, cuda:1, xpu, mps, ... Without an index, the index
            is `local_rank`. auto selects torch's accelerator if available, else the CPU.
        local_rank: the index of this process on its machine.

    Raises:
        SettingError: the device doesn't exist or can't be used.
    """
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if accelerator is None else accelerator.type
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "meta") and device.index is None:
            device = torch.device(device.type, local_rank)
        # Creating a tensor opens the device, which fails here and not in the middle of building.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(
            f"device={name!r} can't be used: {reason}", fix="set device to auto or cpu"
        ) from error
    kind_of(device).select()
    return device


def collective_backends() -> str:
    """Returns the backends of torch.distributed for tensors on the host and on the accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
