"""SAM for eventloop: steps by the gradient at a nearby point where the loss is higher."""

from eventloop_sam.plugin import Sam
from eventloop_sam.sharpness import ascent, restored

__all__ = ["Sam", "ascent", "restored"]
