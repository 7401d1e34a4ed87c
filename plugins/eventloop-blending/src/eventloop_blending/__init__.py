"""What methods that blend samples share: second targets, and batches by turns."""

from eventloop_blending.blends import SecondTargets, TakesTurns, blended, has_turn

__all__ = ["SecondTargets", "TakesTurns", "blended", "has_turn"]
