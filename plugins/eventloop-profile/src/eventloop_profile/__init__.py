"""The operations of a few batches, recorded by torch.profiler: a table and a trace."""

from eventloop_profile.plugin import Profile

__all__ = ["Profile"]
