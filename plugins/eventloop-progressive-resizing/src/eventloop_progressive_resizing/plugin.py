"""The plugin: when images are small, and which targets shrink with them."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from torch import Tensor

from eventloop import PluginError, State, Time, hookimpl
from eventloop.toolbox import (
    Ramp,
    describe_pair,
    is_pair,
    refusal,
    switch_off,
    with_inputs,
    with_targets,
)
from eventloop_progressive_resizing.resizing import (
    Size,
    crop,
    random_corner,
    resize,
    resize_mask,
    size_at,
)


class ProgressiveResizing:
    """Trains on small images first; they grow over the run, and are whole at its end.

    Targets of the same height and width, as masks have, shrink with them. Evaluation sees whole
    images.

    Args:
        initial_scale: height and width at first, as a share of the whole, between 0 and 1.
        start: when images begin to grow, as a time or a fraction of the run, `"0.2dur"`; none: at
            once.
        end: when they are whole; what is left of the run is trained on whole images.
        size_increment: height and width are multiples of it, so that there are few of them.
        mode: resize makes the whole image smaller; crop takes a window of it, another for each
            batch.

    Raises:
        TypeError: an option is of another type.
        ValueError: a value makes no sense.

    Source: Howard 2018, as fast.ai trained ImageNet for DAWNBench; Touvron et al. 2019,
        arXiv:1906.06423, on the step back to whole images.
    """

    def __init__(
        self,
        *,
        initial_scale: float = 0.5,
        start: Time | str | None = None,
        end: Time | str = "0.5dur",
        size_increment: int = 4,
        mode: Literal["resize", "crop"] = "resize",
    ) -> None:
        if isinstance(initial_scale, bool) or not isinstance(initial_scale, int | float):
            raise TypeError(f"initial_scale={initial_scale!r} is not a number")
        if not 0 < initial_scale < 1:
            raise ValueError(f"initial_scale={initial_scale} isn't between 0 and 1")
        if isinstance(size_increment, bool) or not isinstance(size_increment, int):
            raise TypeError(f"size_increment={size_increment!r} is not a whole number")
        if size_increment < 1:
            raise ValueError(f"size_increment={size_increment} is less than 1")
        if mode not in ("resize", "crop"):
            raise ValueError(f"mode={mode!r} is neither 'resize' nor 'crop'")
        self.initial_scale = initial_scale
        self.start = None if start is None else Time(start)
        self.end = Time(end)
        self.size_increment = size_increment
        self.mode = mode
        self._growth: Ramp | None = None

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: no images, or a model that takes no smaller ones; None if it can."""
        try:
            images, _ = _images_of(state.batch)
        except PluginError as error:
            return error.what
        owner = state.owner("train_batch")
        if owner != "core":
            return f"train_batch is {owner}'s, which may compare images with whole ones"
        if not self._can_be_timed(state):
            return "images grow over a share of the run, whose max_duration isn't set"
        size = self._size(images, 0.0)
        if size == images.shape[-2:]:
            return f"images of {_described(size)} have no smaller multiple of {self.size_increment}"
        one = images[:1]
        refused = refusal(state.model, crop(one, size, (0, 0)).contiguous(), one)
        if refused is None:
            return None
        reason = str(refused).partition("\n")[0]
        return f"the model doesn't take images of {_described(size)}: {reason}"

    @hookimpl
    def after_load(self, state: State) -> None:
        """Learns when images grow, now that the length of the run is known."""
        if self._can_be_timed(state):
            self._growth = Ramp.between(self.start, self.end, state)

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Makes the images of the batch smaller, before any other plugin sees them."""
        assert self._growth is not None
        images, targets = _images_of(state.batch)
        full: Size = (images.shape[-2], images.shape[-1])
        size = self._size(images, self._growth.frac(state))
        state.log("progressive-resizing/height", size[0])
        if size == full:
            return
        has_mask = _is_mask(targets, images)
        if self.mode == "crop":
            seed = state.generator("progressive-resizing").initial_seed()
            corner = random_corner(full, size, seed, state.clock.batch)
            images = crop(images, size, corner).contiguous()
            targets = crop(targets, size, corner).contiguous() if has_mask else targets
        else:
            images = resize(images, size)
            targets = resize_mask(targets, size) if has_mask else targets
        state.batch = with_targets(with_inputs(state.batch, images), targets)

    @hookimpl
    def training_end(self, state: State) -> None:
        """Warns if the run has seen no whole images."""
        may_warn = state.rank == 0 and state.stop_reason is None and state.duration is not None
        if may_warn and self._growth is not None and self._growth.frac(state) < 1:
            warnings.warn(
                "progressive-resizing: the run ended before images reached full size, "
                f"end={self.end}; "
                'give an earlier end, as a fraction of the run for example: "0.5dur"',
                stacklevel=2,
            )

    def _can_be_timed(self, state: State) -> bool:
        times = (self.end, self.start or self.end)
        return state.duration is not None or all(time.unit != "dur" for time in times)

    def _size(self, images: Tensor, done: float) -> Size:
        scale = self.initial_scale + (1 - self.initial_scale) * done
        height, width = (size_at(one, scale, self.size_increment) for one in images.shape[-2:])
        return height, width


def _images_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the images and targets of a batch.

    Raises:
        PluginError: it is not a pair of images and of targets that stay true when those shrink.
    """
    if is_pair(batch):
        images, targets = batch
        if isinstance(images, Tensor) and isinstance(targets, Tensor):
            is_image = images.ndim == 4 and images.is_floating_point()
            if is_image and (targets.ndim <= 2 or _is_mask(targets, images)):
                return images, targets
    raise PluginError(
        "it resizes floating-point images of shape (B, C, H, W), with targets that are labels of "
        f"shape (B,) or (B, K) or masks of the images' height and width, not {describe_pair(batch)}",
        fix="let the data loader give such pairs, or switch it off with "
        + switch_off("progressive-resizing"),
    )


def _is_mask(targets: Tensor, images: Tensor) -> bool:
    """Returns whether targets are (B, H, W) or (B, C, H, W), with the size of the images."""
    return targets.ndim in (3, 4) and targets.shape[-2:] == images.shape[-2:]


def _described(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
