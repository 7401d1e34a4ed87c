"""Stochastic weight averaging for eventloop: the mean of the weights of the last epochs."""

from eventloop_swa.plugin import Swa
from eventloop_swa.statistics import batch_norms, estimating
from eventloop_swa.swap import in_place

__all__ = ["Swa", "batch_norms", "estimating", "in_place"]
