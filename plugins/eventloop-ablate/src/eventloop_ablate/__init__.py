"""The command `eventloop ablate`."""

from eventloop_ablate.command import run

__all__ = ["run"]
