"""Lightning's object for a device: its own where it has one, and one for any other that torch names."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.plugins.precision import MixedPrecision


class TorchAccelerator(Accelerator):
    """The accelerator of `torch.accelerator`, of a kind that Lightning doesn't know."""

    def setup_device(self, device: torch.device) -> None:
        """Makes the device of this process the current one."""
        torch.accelerator.set_device_index(device.index or 0)

    def teardown(self) -> None:
        """Leaves it as it is; its memory is for the next fit."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Returns what torch knows of its memory."""
        return dict(torch.accelerator.memory_stats(device))

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        """Returns the device indices for a number of devices, or those that were passed."""
        return list(range(int(devices))) if isinstance(devices, int | str) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Returns the devices of indices."""
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return [torch.device(found.type, idx) for idx in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Returns how many there are."""
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is one."""
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        """Returns what Lightning calls it."""
        return "accelerator"


def accelerator_for(device: torch.device) -> Accelerator:
    """Returns the object for a device."""
    if device.type in AcceleratorRegistry:
        found: Accelerator = AcceleratorRegistry.get(device.type)
        return found
    return TorchAccelerator()


def take_device(strategy: Any, device: torch.device) -> None:
    """Has a strategy work on a device; autocast, too, for which Lightning takes any as CUDA's."""
    strategy._root_device = device
    strategy.accelerator = accelerator_for(device)
    if isinstance(strategy.precision_plugin, MixedPrecision):
        strategy.precision_plugin.device = device.type
