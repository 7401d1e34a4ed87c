"""Gradients that stay until the next batch, for callbacks that look at them when one has ended."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop import State, StepOutcome, hookimpl


class SavedGradients:
    """Empties gradients when a batch begins, as Composer's trainer does, not when one has ended.

    Args:
        is_needed: whether anything may look at them in between.

    Attributes:
        hooks: what the plugin takes over.
    """

    def __init__(self, is_needed: bool) -> None:
        self.hooks = ("zero_grad", "around_step", "split_batch") if is_needed else ()
        self._stale: Mapping[str, Optimizer] = {}
        self._is_stepping = False

    def drop(self) -> None:
        """Empties what the last batch left."""
        stale = self._stale
        self._stale = {}
        for optimizer in stale.values():
            optimizer.zero_grad()

    @hookimpl(conditional=True)
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool | None:
        """Puts off what ends a batch; a closure's gradients begin empty."""
        if self._is_stepping or state.batch is None:
            self._stale = {}
            return None
        self._stale = dict(optimizers)
        return True

    @hookimpl(wrapper=True, specname="optimizer_step")
    def around_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> Generator[None, bool | StepOutcome, bool | StepOutcome]:
        """Notes that a step is under way, which may compute gradients again."""
        self._is_stepping = True
        try:
            return (yield)
        finally:
            self._is_stepping = False

    @hookimpl(wrapper=True)
    def split_batch(self, state: State) -> Generator[None, Any, Any]:
        """Empties what an update before this one in the same batch left."""
        self.drop()
        return (yield)
