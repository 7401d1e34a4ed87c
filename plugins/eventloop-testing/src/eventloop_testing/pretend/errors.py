"""What the pretend device raises where a GPU would compute something else, or crash."""

from __future__ import annotations


class PretendError(RuntimeError):
    """Something that a GPU doesn't do, or doesn't do reliably."""


class RaceError(PretendError):
    """Two accesses to one piece of memory whose order nothing guarantees."""


class MixedDevicesError(PretendError):
    """An operation mixes tensors of the host and of the device."""
