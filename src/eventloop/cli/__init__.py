"""The command `eventloop`."""

from eventloop.cli.main import main

__all__ = ["main"]
