"""The maths of cutmix: draws a rectangle, and fills it with another image.

Source: Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with
Localizable Features", arXiv:1905.04899, section 3.1, equations 1 and 2 and algorithm A1.
"""

# B = batch, C = channel, H = height, W = width

from __future__ import annotations

import math
import random
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """A rectangle of pixels: rows [top, bottom), columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    def share_outside(self, height: int, width: int) -> float:
        """Returns the share of an image outside the rectangle, in [0, 1]."""
        area = (self.bottom - self.top) * (self.right - self.left)
        return 1 - area / (height * width)


def draw_box(alpha: float, seed: int, batch: int, height: int, width: int) -> Box:
    """Draws a rectangle with the image's aspect ratio, centred anywhere, clipped at the border.

    Before clipping its area is 1 - lam of the image, with lam from Beta(alpha, alpha). The draw is a
    function of the arguments, on the host: no wait for the device, no state to save, and a resumed run
    draws the same rectangle for batch 100 as an uninterrupted run.

    Args:
        alpha: more than 0; 1.0 is a uniform distribution of lam.
        seed: seed of the plugin's generator, which differs between runs and ranks.
        batch: number of the batch in the run.
        height, width: size of the images, in pixels.
    """
    draw = random.Random(f"{seed}/{batch}")
    ratio = math.sqrt(1 - draw.betavariate(alpha, alpha))
    top, bottom = _interval(draw.randrange(height), int(height * ratio), height)
    left, right = _interval(draw.randrange(width), int(width * ratio), width)
    return Box(top, bottom, left, right)


def cut_and_paste(images_BCHW: Tensor, permutation_B: Tensor, box: Box) -> Tensor:
    """Fills the rectangle in each image with the same part of another image of the batch.

    Args:
        images_BCHW: images of any dtype.
        permutation_B: int64, on the device of the images; the index of the other image.

    Returns:
        A new tensor of the same shape, dtype and memory format.
    """
    rows = slice(box.top, box.bottom)
    columns = slice(box.left, box.right)
    mixed_BCHW = images_BCHW.clone()
    mixed_BCHW[:, :, rows, columns] = images_BCHW[:, :, rows, columns][permutation_B]
    return mixed_BCHW


def _interval(centre: int, length: int, end: int) -> tuple[int, int]:
    """Returns start and end of an interval around a centre, clipped to [0, end]."""
    return max(centre - length // 2, 0), min(centre + length // 2, end)
