"""The maths of blurpool: a low-pass filter is applied before every second pixel is dropped.

Source: Zhang 2019, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486,
section 3.2.
"""

# B = batch, C = channel, H = height, W = width, K = size of the filter

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, pad

from eventloop.toolbox import Surgery, replace_modules, with_class

Pair = tuple[int, int]
SIZES = range(2, 8)
# A border of zeros would darken the edges; at any other border the layer's own is continued.
_PADDING = {"zeros": "replicate"}


def blur_filter(size: int, stride: Pair = (2, 2)) -> Tensor:
    """Returns the binomial filter of a size, [1, 2, 1] / 4 for 3, along the dimensions with a stride.

    Args:
        size: 2 to 7.
        stride: along height and width; where it is 1, the filter is a single 1.

    Returns:
        float32, shape (1, 1, KH, KW), of sum 1. Its entries are exact in bf16 and fp16, too.
    """
    row = torch.ones(1)
    for _ in range(size - 1):  # a row of Pascal's triangle
        row = torch.cat([row, row.new_zeros(1)]) + torch.cat([row.new_zeros(1), row])
    row = row / row.sum()
    rows, columns = (row if step > 1 else torch.ones(1) for step in stride)
    return torch.outer(rows, columns)[None, None]


def blur(
    x_BCHW: Tensor, filter_11KK: Tensor, stride: Pair = (1, 1), padding: str = "replicate"
) -> Tensor:
    """Filters each channel, and keeps every `stride`-th pixel.

    Args:
        x_BCHW: floating-point; shape (C, H, W) will do.
        filter_11KK: as `blur_filter` gives it; on the device of the input.
        padding: how the image is continued at its border, a mode of `torch.nn.functional.pad`.

    Returns:
        Height and width are those of the input divided by the stride, rounded up.
    """
    height, width = (size - 1 for size in filter_11KK.shape[-2:])
    sides = (width // 2, width - width // 2, height // 2, height - height // 2)
    channels = x_BCHW.shape[-3]
    weight = filter_11KK.to(x_BCHW.dtype).expand(channels, -1, -1, -1)
    return conv2d(pad(x_BCHW, sides, mode=padding), weight, stride=stride, groups=channels)


class BlurConv2d(nn.Conv2d):
    """A convolution with a stride that sees its input blurred; made with `of`.

    Blurring each channel alike and convolving may change places: up to the border this is the
    convolution without its stride, blurred, every `stride`-th pixel of it, at a fraction of the
    cost. It is a `Conv2d` with the parameters of another, so that code that looks for convolutions
    finds it, and the names in its state dict are the same.
    """

    blur_filter: Tensor

    @classmethod
    def of(cls, conv: nn.Conv2d, filter_size: int = 3) -> Self:
        """Makes one of a convolution, whose parameters it shares."""
        made = with_class(conv, cls)
        made.register_buffer(
            "blur_filter", blur_filter(filter_size, _pair(conv.stride)), persistent=False
        )
        return made

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Blurs, then convolves."""
        padding = _PADDING.get(self.padding_mode, self.padding_mode)
        return super().forward(blur(input, self.blur_filter, padding=padding))


class BlurMaxPool2d(nn.MaxPool2d):
    """A max pool with a stride that blurs its maxima before pixels are left out; made with `of`."""

    blur_filter: Tensor

    @classmethod
    def of(cls, pool: nn.MaxPool2d, filter_size: int = 3) -> Self:
        """Makes one of a max pool."""
        made = with_class(pool, cls)
        made.register_buffer(
            "blur_filter", blur_filter(filter_size, _pair(pool.stride)), persistent=False
        )
        return made

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Takes the maximum around every pixel, then blurs and leaves pixels out.

        Whole numbers, as those of a mask of classes, have no means: of them it is the max pool.
        """
        if not input.is_floating_point():
            maxima: Tensor = super().forward(input)
            return maxima
        if self.ceil_mode:
            height, width = (self._lacking(input, dim) for dim in (0, 1))
            input = pad(input, (0, width, 0, height), value=-torch.inf)  # noqa: A001
        maxima = max_pool2d(input, self.kernel_size, 1, self.padding, self.dilation)
        return blur(maxima, self.blur_filter, _pair(self.stride))

    def _lacking(self, x_BCHW: Tensor, dim: int) -> int:
        """Returns how many pixels more the last window takes where the size is rounded up."""
        size = x_BCHW.shape[dim - 2]
        kernel, stride, padding, dilation = (
            _pair(one)[dim] for one in (self.kernel_size, self.stride, self.padding, self.dilation)
        )
        last = size + 2 * padding - dilation * (kernel - 1) - 1  # where the last window begins
        start = -(-last // stride) * stride
        if start >= size + padding:  # a window outside of the image is none
            start -= stride
        return max(0, start - last)


def anti_aliased(
    model: nn.Module,
    *,
    filter_size: int = 3,
    min_channels: int = 16,
    convs: bool = True,
    max_pools: bool = True,
) -> Surgery:
    """Puts `BlurConv2d` and `BlurMaxPool2d` in the place of what leaves pixels out, in place.

    Layers without a stride, of other classes or with `return_indices=True` stay, so that doing it
    twice is doing it once.

    Args:
        filter_size: 2 to 7.
        min_channels: convolutions of fewer input channels stay; those of the image itself, say.
        convs: whether convolutions are replaced.
        max_pools: whether max pools are.

    Returns:
        The model and what was replaced, by name.
    """

    def of_conv(conv: nn.Conv2d) -> nn.Module | None:
        is_wanted = max(_pair(conv.stride)) > 1 and conv.in_channels >= min_channels
        return BlurConv2d.of(conv, filter_size) if convs and is_wanted else None

    def of_pool(pool: nn.MaxPool2d) -> nn.Module | None:
        is_wanted = max(_pair(pool.stride)) > 1 and not pool.return_indices
        return BlurMaxPool2d.of(pool, filter_size) if max_pools and is_wanted else None

    return replace_modules(model, {nn.Conv2d: of_conv, nn.MaxPool2d: of_pool})


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
