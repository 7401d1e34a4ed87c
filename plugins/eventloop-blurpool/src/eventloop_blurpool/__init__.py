"""Blurpool for eventloop: what takes every second pixel blurs first."""

from eventloop_blurpool.blurring import BlurConv2d, BlurMaxPool2d, anti_aliased, blur, blur_filter
from eventloop_blurpool.plugin import Blurpool

__all__ = ["BlurConv2d", "BlurMaxPool2d", "Blurpool", "anti_aliased", "blur", "blur_filter"]
