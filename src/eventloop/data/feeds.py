"""The feeds of a run: one train data loader, and those that take its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eventloop.data.feed import Feed

if TYPE_CHECKING:
    from eventloop.clock import Clock
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State


class Feeds:
    """Knows which data loader training batches come from.

    Args:
        hooks: the plans of the run.
        processes: those that train together.

    Attributes:
        was_rebuilt: whether another data loader has taken the place of the first.
    """

    def __init__(self, hooks: Plans, processes: Processes) -> None:
        self._hooks = hooks
        self._processes = processes
        self._feed: Feed | None = None
        self.was_rebuilt = False

    @property
    def current(self) -> Feed:
        """What gives training batches now."""
        assert self._feed is not None
        return self._feed

    def take(self, state: State, dataloader: Any) -> None:
        """Takes training batches from this data loader from now on."""
        self.was_rebuilt = self._feed is not None
        state.train_dataloader = dataloader
        settings = state.settings
        sample_seed = settings.seed if settings.seed_samples else None
        self._feed = Feed(dataloader, self._processes, settings.uneven, sample_seed)
        state.num_batches = self._feed.num_batches
        if not self.was_rebuilt:
            state.epoch_length = state.num_batches

    def of_epoch(self, state: State) -> Feed:
        """Gives the feed of an epoch, the one under way or the next; rebuilt, if anybody asks."""
        feed = self._feed
        between = feed is not None and feed.used and not feed.under_way
        if between and self._hooks.should_rebuild_dataloader(state):
            self.take(state, self._hooks.build_train_dataloader(state))
        elif feed is None or feed.dataloader is not state.train_dataloader:
            self.take(state, state.train_dataloader)
        return self.current

    def are_ahead_of(self, clock: Clock) -> bool:
        """Tells whether a batch has been taken that isn't done."""
        return self._feed is not None and self._feed.is_ahead_of(clock)

    def give_up(self) -> None:
        """Lets the data loader go, with its workers."""
        self._feed = None

    def state_dict(self) -> dict[str, Any]:
        """Gives whether there was another data loader; where this one is, each rank's feed knows."""
        return {"was_rebuilt": self.was_rebuilt}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.was_rebuilt = state["was_rebuilt"]
