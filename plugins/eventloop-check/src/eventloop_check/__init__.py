"""`fit --check`: reports plugins that assign state, write in place, or read from the device."""

from eventloop_check.check import Check, Finding, HostReads

__all__ = ["Check", "Finding", "HostReads"]
