"""Every hook call as a span for Perfetto, and a table of the time that each plugin took."""

from eventloop_trace.plugin import Trace

__all__ = ["Trace"]
