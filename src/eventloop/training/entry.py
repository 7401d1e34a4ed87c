"""Where the loop enters a run: at its start, or where a checkpoint was saved.

A checkpoint is saved before the loop asks whether to go on, so that is asked when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


class Entry:
    """Where the loop enters a run: here, at the start of an epoch, or where a fit has left it."""

    @property
    def is_ahead(self) -> bool:
        """Whether a run was loaded that hasn't gone on yet."""
        return False

    def between_epochs(self, state: State) -> bool:
        """Returns whether the fit is over before an epoch is entered: `until` may have been moved."""
        return state.clock.reached(state.until)

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Returns whether the epoch under way is over before its next batch, and whether the fit is."""
        return False, False


class AfterCheckpoint(Entry):
    """The loop enters where a checkpoint was saved; once.

    An epoch that was under way is entered even where no batch is left to be trained on: what comes
    at the end of an epoch and of a fit was still to be done when the checkpoint was saved.

    Args:
        hooks: the plans of the run.
        is_in_epoch: whether an epoch was under way.
        go_on: lets the random generators draw on; whatever the events of the entry drew is drawn in
            no other run.
    """

    def __init__(self, hooks: Plans, is_in_epoch: bool, go_on: Callable[[State], None]) -> None:
        self._hooks = hooks
        self._is_between = not is_in_epoch
        self._is_in = is_in_epoch
        self._go_on = go_on

    @property
    def is_ahead(self) -> bool:
        return self._is_between or self._is_in

    def between_epochs(self, state: State) -> bool:
        """Asks what was to be asked after the epoch."""
        if self._is_in:
            return False
        if not self._is_between:
            return state.clock.reached(state.until)
        self._is_between = False
        self._go_on(state)
        return bool(self._hooks.should_stop(state))

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Asks what was to be asked after the batch."""
        if not self._is_in:
            return False, False
        self._is_in = False
        self._go_on(state)
        return bool(self._hooks.should_end_epoch(state)), bool(self._hooks.should_stop(state))
