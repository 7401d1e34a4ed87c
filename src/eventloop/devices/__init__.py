"""What each kind of device can do: the CPU, CUDA (which is also ROCm), and torch's other accelerators.

No other module of eventloop or of its packages names a type of device.
"""

from eventloop.devices.device_kind import DeviceKind
from eventloop.devices.selection import (
    choose_device,
    collective_backends,
    kind_of,
    opened_accelerator,
)

__all__ = [
    "DeviceKind",
    "choose_device",
    "collective_backends",
    "kind_of",
    "opened_accelerator",
]
