"""A device on which every test can run, and which is stricter than a GPU: `pretend_device()`.

It computes on the host, at once, and gives the host's bits. What a GPU would do later, it does as
late as the rules allow; what would be a race there raises `RaceError` here.
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
