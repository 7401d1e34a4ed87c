"""The command `eventloop lr-finder`."""

from eventloop_experiments.lr_finder.curve import Curve, Proposal
from eventloop_experiments.lr_finder.lr_finder_command import run

__all__ = ["Curve", "Proposal", "run"]
