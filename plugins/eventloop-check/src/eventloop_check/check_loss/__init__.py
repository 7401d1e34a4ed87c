"""The command `eventloop check-loss`."""

from eventloop_check.check_loss.check_loss_command import run

__all__ = ["run"]
