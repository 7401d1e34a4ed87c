"""Progressive resizing for eventloop: a run begins with small images, and ends with whole ones."""

from eventloop_progressive_resizing.plugin import ProgressiveResizing
from eventloop_progressive_resizing.resizing import (
    crop,
    random_corner,
    resize,
    resize_mask,
    size_at,
)

__all__ = [
    "ProgressiveResizing",
    "crop",
    "random_corner",
    "resize",
    "resize_mask",
    "size_at",
]
