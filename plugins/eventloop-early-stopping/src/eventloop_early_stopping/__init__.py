"""Early stopping for eventloop: ends a run when a metric has stopped improving."""

from eventloop_early_stopping.plugin import EarlyStopping
from eventloop_early_stopping.waiting import Waiting

__all__ = ["EarlyStopping", "Waiting"]
