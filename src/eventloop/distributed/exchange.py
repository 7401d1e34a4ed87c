"""What the ranks tell each other about a batch: what it counted for, and what one of them wants.

An exchange begins once a batch's data is there and is read when its step has been launched, so
that no device and no step waits for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eventloop.state import State


# Samples and tokens of a batch over all ranks, and the seconds that it took on rank 0.
Agreed = tuple[int, int, float]


class Exchange(Protocol):
    """How a batch's counts and the requests of single ranks become known to all."""

    def request_stop(self, state: State, reason: str) -> None:
        """Asks for the end of the run; the first reason is kept."""

    def request_checkpoint(self, state: State) -> None:
        """Asks for a checkpoint."""

    def start_fit(self) -> None:
        """Begins to take the time; forgets what was asked before."""

    def start(self, state: State) -> None:
        """Sends the other ranks this batch's facts, without waiting for them."""

    def end(self, state: State) -> Agreed:
        """Returns what all ranks told, and grants what one of them asked for."""

    def end_fit(self, state: State) -> None:
        """Grants what one of them has asked for since the last batch."""


class Alone:
    """The exchange of one process, which grants at once what is asked."""

    def __init__(self) -> None:
        self._since = 0.0

    def request_stop(self, state: State, reason: str) -> None:
        """Ends the run after the batch under way."""
        state.stop_reason = state.stop_reason or reason

    def request_checkpoint(self, state: State) -> None:
        """Has a checkpoint saved after the batch under way."""
        state.checkpoint_requested = True

    def start_fit(self) -> None:
        """Begins to take the time."""
        self._since = time.perf_counter()

    def start(self, state: State) -> None:
        """Does nothing: there are no other ranks."""

    def end(self, state: State) -> Agreed:
        """Returns what the batch counted for."""
        since, self._since = self._since, time.perf_counter()
        return state.count.samples, state.count.tokens, self._since - since

    def end_fit(self, state: State) -> None:
        """Does nothing: all that was asked is granted."""
