"""The command `eventloop sweep`."""

from eventloop_sweep.command import run

__all__ = ["run"]
