"""The command `eventloop plugins`."""

from eventloop.cli.plugins.command import run

__all__ = ["run"]
