"""What methods that blend samples share: second targets, and batches by turns."""

from eventloop_blending.blends import SecondTargets, SharesBatches, blended, owns_batch

__all__ = ["SecondTargets", "SharesBatches", "blended", "owns_batch"]
