"""The command `eventloop checkpoints`: one module per subcommand."""

from eventloop_checkpoints.command import run

__all__ = ["run"]
