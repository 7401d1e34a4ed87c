"""Exponential moving average for eventloop: evaluates and exports averaged weights."""

from eventloop_ema.averages import Averages, averaged_names
from eventloop_ema.maths import half_life_of, move, share_of
from eventloop_ema.plugin import Ema

__all__ = ["Averages", "Ema", "averaged_names", "half_life_of", "move", "share_of"]
