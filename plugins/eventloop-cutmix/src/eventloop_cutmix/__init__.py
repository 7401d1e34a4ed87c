"""CutMix for eventloop: pastes a rectangle of another image, and mixes the losses by area."""

from eventloop_cutmix.cutting import Box, cut_and_paste, draw_box
from eventloop_cutmix.plugin import Cutmix

__all__ = ["Box", "Cutmix", "cut_and_paste", "draw_box"]
