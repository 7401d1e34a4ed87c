"""Where the loop continues a resumed run: between epochs, or within one.

A checkpoint is saved before the loop asks whether to stop, so the question is asked on loading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventloop.forms import BatchOrNever

if TYPE_CHECKING:
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


@dataclass(frozen=True)
class LoopState:
    """The loop in a checkpoint: what it has done at which batch count, and whether all is done."""

    is_finished: bool
    evaluated_at: BatchOrNever
    saved_at: BatchOrNever


class ResumePoint:
    """Where the loop enters a run.

    An epoch that was under way is entered even if no batch is left: the end of an epoch and of a fit
    come after the checkpoint of their last batch.

    Args:
        hooks: the plans of the run.
        loaded: where the checkpoint was saved from which the run was loaded, "in epoch" or "between
            epochs"; "" if it wasn't loaded.
        draw_on: lets the random generators draw on: what events drew while loading no other run draws.

    Attributes:
        loaded: as above; "" as soon as training continues.
    """

    def __init__(
        self, hooks: Plans, loaded: str = "", draw_on: Callable[[State], None] | None = None
    ) -> None:
        self._hooks = hooks
        self._draw_on = draw_on
        self.loaded = loaded

    @property
    def is_loaded(self) -> bool:
        """Whether a checkpoint was loaded and training hasn't continued yet."""
        return bool(self.loaded) and self._draw_on is not None

    def enter_again(self, where: str) -> None:
        """Has the next fit enter where the last one raised: what it was about to ask is asked then."""
        self.loaded = self.loaded or where

    def between_epochs(self, state: State) -> bool:
        """Whether the fit is over before an epoch is entered: stopped, or `until` was moved."""
        if self._leaves("between epochs", state):
            return bool(self._hooks.should_stop(state))
        is_over = state.stop_reason is not None or state.clock.reached(state.until)
        return is_over and not self.loaded

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Whether the epoch under way is over before its next batch, and whether the fit is."""
        if self._leaves("in epoch", state):
            return bool(self._hooks.should_end_epoch(state)), bool(self._hooks.should_stop(state))
        return False, False

    def _leaves(self, where: str, state: State) -> bool:
        if self.loaded != where:
            return False
        self.loaded = ""
        if self._draw_on is not None:
            self._draw_on(state)
            self._draw_on = None  # only what was drawn while loading is undone
        return True
