"""The maths of cutmix: a rectangle, and images in which it shows another one.

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
    """A rectangle of pixels: rows from `top` to before `bottom`, columns likewise."""

    top: int
    bottom: int
    left: int
    right: int

    def share_outside(self, height: int, width: int) -> float:
        """Returns the share of an image that the rectangle leaves, in [0, 1]."""
        area = (self.bottom - self.top) * (self.right - self.left)
        return 1 - area / (height * width)


def draw_box(alpha: float, seed: int, batch: int, height: int, width: int) -> Box:
    """Draws a rectangle of the image's proportions, its centre anywhere, cut off at the border.

    Its area is 1 - lam of the image's before it is cut off, with lam from Beta(alpha, alpha). The
    draw is a function of the arguments, on the host: nothing waits for a device, there is no state
    to save, and a resumed run draws for batch 100 what an unbroken one would have drawn.

    Args:
        alpha: more than 0; 1.0 draws any share as likely.
        seed: the plugin's own, which differs between runs and ranks.
        batch: the batch's number in the run.
        height: of the images, in pixels; and their `width`.
    """
    draw = random.Random(f"{seed}/{batch}")
    ratio = math.sqrt(1 - draw.betavariate(alpha, alpha))
    top, bottom = _stretch(draw.randrange(height), int(height * ratio), height)
    left, right = _stretch(draw.randrange(width), int(width * ratio), width)
    return Box(top, bottom, left, right)


def cut_and_paste(images_BCHW: Tensor, permutation_B: Tensor, box: Box) -> Tensor:
    """Returns images in each of which the rectangle shows another one of the batch.

    Args:
        images_BCHW: of any dtype.
        permutation_B: int64, on the device of the images; which one for each.

    Returns:
        A new tensor of the same shape, dtype and memory format.
    """
    rows = slice(box.top, box.bottom)
    columns = slice(box.left, box.right)
    mixed_BCHW = images_BCHW.clone()
    mixed_BCHW[:, :, rows, columns] = images_BCHW[:, :, rows, columns][permutation_B]
    return mixed_BCHW


def _stretch(centre: int, length: int, end: int) -> tuple[int, int]:
    """Returns where a stretch around a centre begins and ends, within 0 and `end`."""
    return max(centre - length // 2, 0), min(centre + length // 2, end)
