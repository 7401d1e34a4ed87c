"""The command `eventloop checkpoints`."""

from eventloop.cli.checkpoints.command import run

__all__ = ["run"]
