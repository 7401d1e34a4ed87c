"""Keeps gradients until the next batch, for callbacks that read them at the end of a batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop import State, StepOutcome, hookimpl


class SavedGradients:
    """Zeroes gradients when a batch begins, as Composer's trainer does, not when it ends.

    Args:
        is_needed: whether any callback may read them in between.

    Attributes:
        hooks: names of the hooks for the plugin.
    """

    def __init__(self, is_needed: bool) -> None:
        self.hooks = ("zero_grad", "around_step", "split_batch") if is_needed else ()
        self._stale: Mapping[str, Optimizer] = {}
        self._is_stepping = False

    def drop(self) -> None:
        """Zeroes the gradients of the last batch."""
        stale = self._stale
        self._stale = {}
        for optimizer in stale.values():
            optimizer.zero_grad()

    @hookimpl(conditional=True)
    def zero_grad(self, state: State, optimizers: Mapping[str, Optimizer]) -> bool | None:
        """Defers zeroing at the end of a batch, but not inside a step, whose closure needs zeroed gradients."""
        if self._is_stepping or state.batch is None:
            self._stale = {}
            return None
        self._stale = dict(optimizers)
        return True

    @hookimpl(wrapper=True, specname="optimizer_step")
    def around_step(
        self, state: State, optimizers: Mapping[str, Optimizer], closure: Callable[[], Tensor]
    ) -> Generator[None, bool | StepOutcome, bool | StepOutcome]:
        """Marks a step, which may compute gradients again."""
        self._is_stepping = True
        try:
            return (yield)
        finally:
            self._is_stepping = False

    @hookimpl(wrapper=True)
    def split_batch(self, state: State) -> Generator[None, Any, Any]:
        """Zeroes the gradients of an earlier update in the same batch."""
        self.drop()
        return (yield)
