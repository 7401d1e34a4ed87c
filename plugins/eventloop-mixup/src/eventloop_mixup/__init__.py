"""Mixup for eventloop: trains on blends of two samples and of their losses."""

from eventloop_mixup.mixing import draw_lam, mix
from eventloop_mixup.plugin import Mixup

__all__ = ["Mixup", "draw_lam", "mix"]
