"""The maths of progressive resizing: how large images are, and how they become so."""

# B = batch, C = channel, H = height, W = width; ... = any dimensions before

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.nn.functional import interpolate

Size = tuple[int, int]


def size_at(full: int, scale: float, increment: int) -> int:
    """Returns the height or width at a scale: a multiple of the increment, unless it is the whole.

    Args:
        full: that of the whole image.
        scale: more than 0; from 1 on nothing changes.
        increment: what sizes are multiples of, so that there are few of them.

    Returns:
        The multiple below, at least one increment, at most `full`.
    """
    if scale >= 1:
        return full
    num_increments = int(full * scale / increment + 1e-6)  # 3 * (1 / 3) shall be 1
    return min(full, max(1, num_increments) * increment)


def resize(images_BCHW: Tensor, size: Size) -> Tensor:
    """Makes images smaller, each pixel the weighted mean of those that it covers.

    Args:
        images_BCHW: floating-point, of any dtype and device.
        size: height and width, at most those of the images.

    Returns:
        New images of the same dtype; half precision is computed in float32.
    """
    exact = images_BCHW if images_BCHW.dtype == torch.float64 else images_BCHW.float()
    small = interpolate(exact, size, mode="bilinear", align_corners=False, antialias=True)
    return small.to(images_BCHW.dtype)


def resize_mask(mask_HW: Tensor, size: Size) -> Tensor:
    """Makes masks smaller; each pixel is the one in the middle of those that it covers.

    Args:
        mask_HW: of any dtype and shape (..., H, W): classes are never mixed.
        size: height and width.
    """
    for dim, now in ((-2, size[0]), (-1, size[1])):
        full = mask_HW.shape[dim]
        middles = (torch.arange(now, device=mask_HW.device) * 2 + 1) * full // (2 * now)
        mask_HW = mask_HW.index_select(dim, middles)
    return mask_HW


def crop(images_HW: Tensor, size: Size, corner: Size) -> Tensor:
    """Cuts a window out of images or masks of shape (..., H, W); returns a view.

    Args:
        size: height and width of the window.
        corner: row and column of its first pixel.
    """
    (height, width), (top, left) = size, corner
    return images_HW[..., top : top + height, left : left + width]


def random_corner(full: Size, size: Size, seed: int, batch: int) -> Size:
    """Draws where a window of a size lies in an image.

    The draw is a function of its arguments, on the host: there is no state to save, and a resumed
    run draws for batch 100 what an unbroken one would have drawn.

    Args:
        seed: the plugin's own, which differs between runs and ranks.
        batch: the batch's number in the run.
    """
    draw = random.Random(f"{seed}/{batch}")
    height, width = (draw.randint(0, whole - part) for whole, part in zip(full, size, strict=True))
    return height, width
