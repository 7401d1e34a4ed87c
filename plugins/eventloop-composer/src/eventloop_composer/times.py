"""Composer's times and ours: the units are the same, the classes aren't."""

from __future__ import annotations

import functools
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from composer.core import Time as ComposerTime
from composer.core import Timestamp, TimeUnit

from eventloop import Time
from eventloop.toolbox import FIELDS

if TYPE_CHECKING:
    from eventloop import Clock, Moment

_UNITS = {
    "ep": TimeUnit.EPOCH,
    "ba": TimeUnit.BATCH,
    "sp": TimeUnit.SAMPLE,
    "tok": TimeUnit.TOKEN,
    "sec": TimeUnit.SECOND,
    "dur": TimeUnit.DURATION,
}
_NAMES = {unit: name for name, unit in _UNITS.items()}


def to_theirs(time: Time) -> ComposerTime:
    """Returns one of our times as Composer's; seconds are rounded, which theirs are whole of."""
    value = time.value if time.unit == "dur" else round(time.value)
    return ComposerTime(value, _UNITS[time.unit])


def to_ours(time: ComposerTime) -> Time:
    """Returns one of Composer's times as ours.

    Raises:
        ValueError: we have no such unit, `iter`, or the time isn't above zero.
    """
    if time.unit not in _NAMES:
        raise ValueError(f"{time} is in {time.unit}, which eventloop doesn't count")
    return Time(time.value, _NAMES[time.unit])


def until(duration: ComposerTime, since: Moment) -> Time:
    """Returns when a run ends on our clock, whose duration Composer counts from a moment.

    Raises:
        ValueError: as `to_ours` does.
    """
    time = to_ours(duration)
    return Time(time.value + getattr(since, FIELDS[time.unit]), time.unit)


@functools.lru_cache(maxsize=16)
def _counted(value: int, unit: str) -> ComposerTime:
    return ComposerTime(value, TimeUnit(unit))


class Evaluated:
    """The seconds of evaluations in a fit, which Composer's time of training leaves out.

    Attributes:
        in_batch_s: of those between the last batch and the one before it.
        in_epoch_s: of those since the epoch's first batch began, and right before it.
    """

    def __init__(self) -> None:
        self.in_batch_s = self.in_epoch_s = 0.0
        self._begun = self._pending_s = 0.0

    def start_fit(self) -> None:
        """Forgets evaluations before the fit, which our clock doesn't count either."""
        self._pending_s = 0.0

    def begin(self) -> None:
        """Notes that an evaluation begins."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Notes that it has ended."""
        self._pending_s += time.perf_counter() - self._begun

    def end_batch(self, clock: Clock) -> None:
        """Takes what was evaluated as a part of the batch that is done now, by our clock."""
        self.in_batch_s = self._pending_s
        self._pending_s = 0.0
        self.in_epoch_s = self.in_batch_s + (self.in_epoch_s if clock.batch_in_epoch > 1 else 0.0)


def timestamp_of(clock: Clock, since: Moment, evaluated: Evaluated) -> Timestamp:
    """Returns the clock as Composer's timestamp, counted from `since`, a moment between epochs.

    Its iterations stay 0: we have none, and Composer's own run is a single one unless it is told
    otherwise. The time of the last batch is 0 when an epoch has ended, as theirs is.
    """
    in_epoch = clock.batch_in_epoch
    now = clock.moment()
    total = timedelta(seconds=now.seconds - since.seconds)
    # Made once where they stand for long: each takes a microsecond.
    epoch = _counted(now.epoch - since.epoch, "ep")
    token = _counted(now.token - since.token, "tok")
    return Timestamp(
        iteration=_counted(0, "iter"),
        epoch=epoch,
        batch=now.batch - since.batch,
        sample=now.sample - since.sample,
        token=token,
        epoch_in_iteration=epoch,
        token_in_iteration=token,
        batch_in_epoch=in_epoch,
        sample_in_epoch=clock.sample_in_epoch,
        token_in_epoch=clock.token_in_epoch,
        total_wct=total,
        iteration_wct=total,
        epoch_wct=timedelta(
            seconds=clock.seconds_in_epoch - evaluated.in_epoch_s if in_epoch else 0
        ),
        batch_wct=timedelta(
            seconds=now.seconds - clock.previous.seconds - evaluated.in_batch_s if in_epoch else 0
        ),
    )
