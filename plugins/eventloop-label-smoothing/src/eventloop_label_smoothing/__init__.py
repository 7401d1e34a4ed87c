"""Label smoothing for eventloop: no class is ever meant to be certain."""

from eventloop_label_smoothing.plugin import LabelSmoothing
from eventloop_label_smoothing.smoothing import SmoothedCrossEntropy

__all__ = ["LabelSmoothing", "SmoothedCrossEntropy"]
