"""Stops before the planned end of a run: their description in results, and warnings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventloop.errors import counted

if TYPE_CHECKING:
    from eventloop.clock import Moment
    from eventloop.state import State

ANSWERED = "should_stop was answered with True"
# The origin of a stop that the task requested.
_TASK = "task"


@dataclass(frozen=True)
class Stopped:
    """Why a fit ended before its planned end.

    Args:
        reason: the reason passed to `request_stop`.
        plugin: the plugin that requested the stop, with its package and version; "task" for the task;
            None for the caller or the core.
        moment: when the fit ended.
    """

    reason: str
    plugin: str | None
    moment: Moment

    def __str__(self) -> str:
        epochs = counted(self.moment.epoch, "epoch")
        return f"{self.cause} ({epochs}, {counted(self.moment.batch, 'batch', 'batches')})"

    @property
    def cause(self) -> str:
        """Who stopped the run, and why: `stopped by early-stopping (...): valid/loss ...`."""
        if self.plugin is None:
            return f"stopped: {self.reason}"
        # Reasons often begin with the name of the plugin.
        reason = self.reason.removeprefix(f"{self.plugin.partition(' ')[0]}: ")
        return f"stopped by {'the task' if self.plugin == _TASK else self.plugin}: {reason}"

    @property
    def is_planned(self) -> bool:
        """Whether the task ended its own run, for example because it counts steps itself."""
        return self.plugin == _TASK and self.reason == ANSWERED


def stop_of(state: State) -> Stopped | None:
    """Returns why the last fit was stopped; None if it wasn't."""
    reason = state.stop_reason
    return None if reason is None else Stopped(str(reason), reason.plugin, state.clock.moment())


def warn_of_overridden_stop(state: State, stopped: Stopped) -> None:
    """Warns that this fit continues a run that was stopped on purpose."""
    if state.rank == 0:
        warnings.warn(
            f"the run was {stopped}, and this fit() continues it until {state.until}; "
            "fit(until=...) continues it without this warning",
            stacklevel=2,
        )


def warn_of_repeated_stop(state: State, stopped: Stopped) -> None:
    """Warns that a fit trained no batch, because the run was stopped again before its first batch.

    Doesn't warn about a pruned trial, which is stopped whenever it is started.
    """
    is_pruned = state.stop_reason is not None and state.stop_reason.kind == "pruned"
    if state.rank == 0 and not is_pruned:
        warnings.warn(
            f"nothing was trained: the run is {stopped}. To continue it, call fit(until=...) with a "
            "later end, or change the options of the plugin that stops it",
            stacklevel=4,
        )
