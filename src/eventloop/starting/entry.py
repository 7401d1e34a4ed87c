"""Where the loop enters a run: at its start, or where a checkpoint was saved.

A checkpoint is saved before the loop asks whether to go on, so that is asked when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eventloop.plugin.freeze import Plans
    from eventloop.state import State


class Entry(Protocol):
    """Where the loop enters a run."""

    @property
    def is_ahead(self) -> bool:
        """Whether a run was loaded that hasn't gone on yet."""

    def between_epochs(self, state: State) -> bool:
        """Tells whether the run is over before its next epoch."""

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Tells whether the epoch under way is over before its next batch, and whether the run is."""


class FromStart:
    """The loop enters at the start of an epoch, or where a fit has left it."""

    is_ahead = False

    def between_epochs(self, state: State) -> bool:
        """Answers no."""
        return False

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Answers no, twice."""
        return False, False


class AfterCheckpoint:
    """The loop enters where a checkpoint was saved; once.

    Args:
        hooks: the plans of the run.
        is_in_epoch: whether an epoch was under way.
        put_generators: lets the random generators draw on; whatever the events of the entry drew
            is drawn in no other run.
    """

    def __init__(self, hooks: Plans, is_in_epoch: bool, put_generators: Callable[[], None]) -> None:
        self._hooks = hooks
        self._is_between = not is_in_epoch
        self._is_in = is_in_epoch
        self._put_generators = put_generators

    @property
    def is_ahead(self) -> bool:
        """Whether the run hasn't gone on yet."""
        return self._is_between or self._is_in

    def between_epochs(self, state: State) -> bool:
        """Asks what was to be asked after the epoch."""
        if not self._is_between:
            return False
        self._is_between = False
        self._put_generators()
        return bool(self._hooks.should_stop(state))

    def in_epoch(self, state: State) -> tuple[bool, bool]:
        """Asks what was to be asked after the batch."""
        if not self._is_in:
            return False, False
        self._is_in = False
        self._put_generators()
        return bool(self._hooks.should_end_epoch(state)), bool(self._hooks.should_stop(state))
