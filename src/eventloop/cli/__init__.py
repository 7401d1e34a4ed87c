"""The command `eventloop`."""

from eventloop.cli.entry import main

__all__ = ["main"]
