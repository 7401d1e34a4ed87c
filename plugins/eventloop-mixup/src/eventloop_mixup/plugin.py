"""The plugin: when a batch is mixed, and which targets its loss sees."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError, State, hookimpl
from eventloop.toolbox import SecondTargets, describe_pair, is_pair, owns_batch, switch_off
from eventloop_mixup.mixing import draw_lam, mix


class Mixup:
    """Trains on blends of two samples of a batch and of the losses of both targets.

    `state.targets` keeps the originals, so that metrics, and losses of class indices, keep working.
    Evaluation sees unmixed batches.

    Args:
        alpha: strength of mixing, more than 0: once per batch, the share of the originals is drawn from
            Beta(alpha, alpha). The paper uses 0.1 to 0.4; 1.0 is uniform.

    Raises:
        TypeError: `alpha` is not a number.
        ValueError: `alpha` isn't positive.

    Source: Zhang et al. 2018, arXiv:1710.09412.
    """

    takes_turns = "blend"

    def __init__(self, *, alpha: float = 0.2) -> None:
        if not isinstance(alpha, int | float):
            raise TypeError(f"alpha={alpha!r} is not a number; the paper takes 0.1 to 0.4")
        if not (alpha > 0 and math.isfinite(alpha)):
            raise ValueError(f"alpha={alpha!r} isn't a positive number; the paper takes 0.1 to 0.4")
        self.alpha = alpha
        self._second = SecondTargets("mixup")

    @hookimpl
    def unsuitable(self, state: State) -> str | None:
        """Returns why the plugin can't be used: the first batch can't be mixed, or the task has no loss to blend; None if it can."""
        try:
            _mixable(state.batch)
        except PluginError:
            return (
                f"it mixes float inputs with a tensor of targets, not {describe_pair(state.batch)}"
            )
        return self._second.unsuitable(state)

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Mixes the whole batch before it is split, so that microbatches make no difference."""
        inputs, targets = _mixable(state.batch)
        # With cutmix active, too, a batch belongs to only one of both.
        if not owns_batch(state, self):
            return
        generator = state.generator("mixup")
        permutation = torch.randperm(len(inputs), generator=generator, device=state.device)
        lam = draw_lam(self.alpha, generator.initial_seed(), state.clock.batch)
        state.inputs = mix(inputs, permutation, lam)
        self._second.give(targets[permutation], lam)

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
        """Blends the loss of the originals with the loss of the shuffled targets."""
        return (yield from self._second.loss(state))


def _mixable(batch: Any) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of a batch that can be mixed.

    Raises:
        PluginError: it isn't a pair of a floating-point tensor and a tensor with the same number of samples.
    """
    if is_pair(batch):
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            shapes = inputs.shape[:1], targets.shape[:1]
            if inputs.is_floating_point() and shapes[0] == shapes[1] != ():
                return inputs, targets
    raise PluginError(
        "mixup blends a floating-point tensor of inputs whose targets are a tensor of as many "
        f"samples, but got {describe_pair(batch)}",
        fix="let the data loader give such pairs, for images as float between 0 and 1, "
        "or switch mixup off with " + switch_off("mixup"),
    )
