"""Lightning's accelerator object for a device: Lightning's own, or a generic one for other devices of torch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision


class TorchAccelerator(Accelerator):
    """The device of `torch.accelerator`, if Lightning doesn't know its type."""

    def setup_device(self, device: torch.device) -> None:
        """Makes the device of this process the current device."""
        torch.accelerator.set_device_index(device.index or 0)

    def teardown(self) -> None:
        """Does nothing: the memory is reused by the next fit."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Returns torch's memory statistics of the device."""
        return dict(torch.accelerator.memory_stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Returns the device indices for a number of devices, or those that were passed."""
        return list(range(int(devices))) if isinstance(devices, int | str) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Returns the devices of indices."""
        current_device = torch.accelerator.current_accelerator()
        assert current_device is not None
        return [torch.device(current_device.type, idx) for idx in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Returns the number of devices."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether a device is available."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """Returns the name under which Lightning knows it."""
        return "accelerator"


def accelerator_for(device: torch.device) -> Accelerator:
    """Returns the object for a device."""
    if device.type in AcceleratorRegistry:
        accelerator: Accelerator = AcceleratorRegistry.get(device.type)
        return accelerator
    return TorchAccelerator()


def take_device(strategy: Any, device: torch.device) -> None:
    """Sets the device of a strategy, and of autocast, which Lightning sets to CUDA for any accelerator."""
    strategy._root_device = device
    strategy.accelerator = accelerator_for(device)
    if isinstance(strategy.precision_plugin, MixedPrecision):
        strategy.precision_plugin.device = device.type
