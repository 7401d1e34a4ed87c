"""Selective backprop for eventloop: trains on the samples that have the highest loss."""

from eventloop_selective_backprop.plugin import SelectiveBackprop
from eventloop_selective_backprop.selection import draw, per_sample, take

__all__ = ["SelectiveBackprop", "draw", "per_sample", "take"]
