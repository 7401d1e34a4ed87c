"""Parts of messages: the closest of several names, a number with its noun; works without torch."""

from __future__ import annotations

from eventloop.errors import closest, counted

__all__ = ["closest", "counted"]
