"""`fit --check`: who assigns what, which callback writes in place, and who reads from the device."""

from eventloop_check.check import Check, Finding, HostReads

__all__ = ["Check", "Finding", "HostReads"]
