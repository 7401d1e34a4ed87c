"""The plugin: when a batch is mixed, and which targets its loss sees."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eventloop import PluginError, State, TaskError, hookimpl
from eventloop.data import describe, is_pair
from eventloop_mixup.mixing import blend, draw_lam, mix


@dataclass
class _Mix:
    """How the batch under way is mixed.

    Args:
        lam: share of the originals.
        targets: of the whole batch, shuffled.
        parts: the same in microbatches, as they were last split.
    """

    lam: float
    targets: Tensor
    parts: list[Tensor] = field(default_factory=list)


class Mixup:
    """Trains on blends of two samples of a batch and of the losses of both targets.

    `state.targets` keeps the originals, so that metrics and losses of class indices go on working.
    Evaluation sees unmixed batches.

    Args:
        alpha: how strongly to mix, more than 0: the share of the originals is drawn from
            Beta(alpha, alpha) once a batch. The paper takes 0.1 to 0.4; 1.0 draws it uniformly.

    Raises:
        TypeError: `alpha` is no number.
        ValueError: it isn't a positive one.

    Source: Zhang et al. 2018, arXiv:1710.09412.
    """

    def __init__(self, *, alpha: float = 0.2) -> None:
        if not isinstance(alpha, int | float):
            raise TypeError(f"alpha={alpha!r} is no number; the paper takes 0.1 to 0.4")
        if not (alpha > 0 and math.isfinite(alpha)):
            raise ValueError(f"alpha={alpha!r} isn't a positive number; the paper takes 0.1 to 0.4")
        self.alpha = alpha
        self._mix: _Mix | None = None

    def unsuitable(self, state: State) -> str | None:
        """Stands off where the first batch can't be mixed."""
        try:
            _mixable(state.batch)
        except PluginError:
            return f"it mixes float inputs with a tensor of targets, not {_described(state.batch)}"
        return None

    @hookimpl(wrapper=True)
    def train_batch(self, state: State) -> Generator[None, bool, bool]:
        """Forgets the mix when the step is done: the closure of a step still needs it."""
        try:
            return (yield)
        finally:
            self._mix = None

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Mixes the whole batch, so that its slicing into microbatches changes nothing."""
        inputs, targets = _mixable(state.batch)
        generator = state.generator("mixup")
        permutation = torch.randperm(len(inputs), generator=generator, device=state.device)
        lam = draw_lam(self.alpha, generator.initial_seed(), state.clock.batch)
        state.inputs = mix(inputs, permutation, lam)
        self._mix = _Mix(lam, targets[permutation])

    @hookimpl(wrapper=True)
    def split_batch(self, state: State) -> Generator[None, Sequence[Any], Sequence[Any]]:
        """Splits the shuffled targets as the batch is split, whoever does it."""
        microbatches = yield
        if self._mix is not None:
            originals = state.targets
            state.targets = self._mix.targets
            try:
                self._mix.parts = [targets for _, targets in state.again()]
            finally:
                state.targets = originals
        return microbatches

    @hookimpl(wrapper=True)
    def loss(self, state: State) -> Generator[None, Tensor, Tensor]:
        """Blends the loss of the originals with the loss of the shuffled targets."""
        original = yield
        if self._mix is None:
            return original
        targets = state.targets
        state.targets = self._mix.parts[state.microbatch_idx]
        try:
            other: Tensor = state.again()
        finally:
            state.targets = targets
        if other is original:
            raise TaskError(
                "mixup needs a loss of outputs and targets, but this one is part of the model's "
                f"{type(state.outputs).__name__} and never sees the shuffled targets",
                fix="give Task(loss=...), or switch mixup off with `-p no:mixup`",
            )
        return blend(original, other, self._mix.lam)


def _mixable(batch: Any) -> tuple[Tensor, Tensor]:
    """Gives the inputs and targets of a batch that can be mixed.

    Raises:
        PluginError: it is no pair of a floating-point tensor and a tensor of as many samples.
    """
    if is_pair(batch):
        inputs, targets = batch
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            shapes = inputs.shape[:1], targets.shape[:1]
            if inputs.is_floating_point() and shapes[0] == shapes[1] != ():
                return inputs, targets
    raise PluginError(
        "mixup blends a floating-point tensor of inputs whose targets are a tensor of as many "
        f"samples, but got {_described(batch)}",
        fix="let the data loader give such pairs, for images as float between 0 and 1, "
        "or switch mixup off with `-p no:mixup`",
    )


def _described(batch: Any) -> str:
    if not is_pair(batch):
        return f"a batch that is {describe(batch)}"
    parts = [
        f"{value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else describe(value)
        for value in batch
    ]
    return f"a pair of inputs, {parts[0]}, and targets, {parts[1]}"
