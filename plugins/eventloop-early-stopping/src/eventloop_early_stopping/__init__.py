"""Early stopping for eventloop: ends a run when a metric has stopped improving."""

from eventloop_early_stopping.patience import Waiting
from eventloop_early_stopping.plugin import EarlyStopping

__all__ = ["EarlyStopping", "Waiting"]
