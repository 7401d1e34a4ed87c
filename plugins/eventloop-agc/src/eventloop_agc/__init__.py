"""Adaptive gradient clipping for eventloop: units are clipped relative to their weights."""

from eventloop_agc.clipping import clip_units_, unit_norms
from eventloop_agc.plugin import Agc

__all__ = ["Agc", "clip_units_", "unit_norms"]
