"""A simulated accelerator for tests, stricter than a GPU: `pretend_device()`.

It computes on the host, immediately, with bit-identical results. Work that a GPU may do later, it does
as late as the rules allow; an access that would be a race on a GPU raises `RaceError`.
"""

from __future__ import annotations

from eventloop_testing.pretend.errors import MixedDevicesError, PretendError, RaceError
from eventloop_testing.pretend.switch import pretend_device
from eventloop_testing.pretend.waits import Wait, counted_waits

__all__ = [
    "MixedDevicesError",
    "PretendError",
    "RaceError",
    "Wait",
    "counted_waits",
    "pretend_device",
]
