"""Where the loop continues a resumed run: between epochs, or within an epoch.

A checkpoint is saved before the loop calls `should_stop`, so a resumed run calls it first.
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
    """The position at which the loop enters a run.

    An unfinished epoch is entered even if it has no batches left, since the events at the end of an
    epoch and of a fit come after the checkpoint of the last batch.

    Args:
        hooks: the plans of the run.
        loaded: the position of the loaded checkpoint, "in epoch" or "between epochs"; "" for a run that
            wasn't loaded.
        draw_on: restores the random generators, since events may have drawn numbers during loading
            that an uninterrupted run doesn't draw.

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

    def enter_again(self, position: str) -> None:
        """Makes the next fit start at the position where the last fit raised."""
        self.loaded = self.loaded or position

    def between_epochs(self, state: State) -> bool:
        """Whether the fit is over before the next epoch: it was stopped, or `until` is reached."""
        if self._leaves("between epochs", state):
            return bool(self._hooks.should_stop(state))
        is_over = state.stop_reason is not None or state.clock.reached(state.until)
        return is_over and not self.loaded

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Returns whether the current epoch is over before its next batch, and whether the fit is."""
        if self._leaves("in epoch", state):
            return bool(self._hooks.should_end_epoch(state)), bool(self._hooks.should_stop(state))
        return False, False

    def _leaves(self, position: str, state: State) -> bool:
        """Returns whether the run was loaded at this position; it is then no longer `loaded`."""
        if self.loaded != position:
            return False
        self.loaded = ""
        if self._draw_on is not None:
            self._draw_on(state)
            # Once only: numbers drawn later are part of the run.
            self._draw_on = None
        return True
