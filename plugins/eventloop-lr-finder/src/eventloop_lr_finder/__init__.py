"""The command `eventloop lr-finder`."""

from eventloop_lr_finder.command import run
from eventloop_lr_finder.curve import Curve, Proposal

__all__ = ["Curve", "Proposal", "run"]
