"""The command `eventloop ablate`."""

from eventloop.cli.ablate.command import run

__all__ = ["run"]
