"""Observers: what wraps implementations of hooks, to watch a run."""

from __future__ import annotations

from eventloop.plugin.hook_errors import moment_in
from eventloop.plugin.observe import Observer, caller, instead, with_context
from eventloop.plugin.order import Implementation

__all__ = ["Implementation", "Observer", "caller", "instead", "moment_in", "with_context"]
