"""Errors that the pretend device raises where a GPU would return wrong results, or crash."""

from __future__ import annotations


class PretendError(RuntimeError):
    """An operation that fails or isn't reliable on a GPU."""


class RaceError(PretendError):
    """Two unordered accesses to the same memory."""


class MixedDevicesError(PretendError):
    """An operation mixes tensors on the host and on the device."""
