"""The command `eventloop check-loss`."""

from eventloop_check_loss.command import run

__all__ = ["run"]
