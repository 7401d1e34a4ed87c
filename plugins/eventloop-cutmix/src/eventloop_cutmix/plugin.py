"""The plugin: which batches are cut, and which targets their loss sees."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError, State, hookimpl
from eventloop.toolbox import SecondTargets, describe_pair, is_pair, owns_batch, switch_off
from eventloop_cutmix.cutting import cut_and_paste, draw_box


class Cutmix:
    """Pastes a rectangle of another image into each image, and mixes the losses of both by area.

    `state.targets` keeps the originals, so that metrics, and losses of class indices, keep working.
    Evaluation sees whole images. Together with mixup, each batch is either cut or mixed.

    Args:
        alpha: distribution of the rectangles' size, more than 0: once per batch, the share of the image
            that stays is drawn from Beta(alpha, alpha). The paper uses 1.0, which is uniform; small
            values leave almost all or almost nothing.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` isn't positive.

    Source: Yun et al. 2019, arXiv:1905.04899.
    """

    takes_turns = "blend"

    def __init__(self, *, alpha: float = 1.0) -> None:
        if not isinstance(alpha, int | float):
            raise TypeError(f"alpha={alpha!r} is not a number; the paper takes 1.0")
        if not (alpha > 0 and math.isfinite(alpha)):
            raise ValueError(f"alpha={alpha!r} isn't a positive number; the paper takes 1.0")
        self.alpha = alpha
        self._second = SecondTargets("cutmix")

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: the first batch can't be cut, or the task has no loss to mix; None if it can."""
        if not _can_be_cut(state.batch):
            return f"it cuts {_WANTED}, not {describe_pair(state.batch)}"
        return self._second.unsuitable(state)

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Cuts the whole batch before it is split, so that microbatches make no difference."""
        if not _can_be_cut(state.batch):
            raise PluginError(
                f"cutmix cuts {_WANTED}, but got {describe_pair(state.batch)}",
                fix="let the data loader give such pairs, or switch cutmix off with "
                + switch_off("cutmix"),
            )
        # With mixup active, too, a batch belongs to only one of both.
        if not owns_batch(state, self):
            return
        images = state.inputs
        targets = state.targets
        height, width = images.shape[2:]
        generator = state.generator("cutmix")
        permutation = torch.randperm(len(images), generator=generator, device=state.device)
        box = draw_box(self.alpha, generator.initial_seed(), state.clock.batch, height, width)
        state.inputs = cut_and_paste(images, permutation, box)
        self._second.give(targets[permutation], box.share_outside(height, width))

    @hookimpl(wrapper=True)
    def train_batch(self, state: State) -> Generator[None, bool, bool]:
        """Clears the shuffled targets after the step."""
        return (yield from self._second.train_batch(state))

    @hookimpl(wrapper=True)
    def split_batch(self, state: State) -> Generator[None, Sequence[Any], Sequence[Any]]:
        """Splits the shuffled targets like the batch."""
        return (yield from self._second.split_batch(state))

    @hookimpl(wrapper=True)
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Mixes the loss of the originals with the loss of the shuffled targets."""
        return (yield from self._second.loss(state))


_WANTED = "images, a tensor of shape (B, C, H, W), whose targets are one a sample"


def _can_be_cut(batch: Any) -> bool:
    """Whether a batch is a pair of images and of a class index, or probabilities, for each image."""
    if not is_pair(batch):
        return False
    images, targets = batch
    if not isinstance(images, Tensor) or not isinstance(targets, Tensor):
        return False
    return images.ndim == 4 and targets.ndim in (1, 2) and len(images) == len(targets)
