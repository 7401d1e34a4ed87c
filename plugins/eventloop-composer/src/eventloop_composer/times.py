"""Converts between times of Composer and eventloop: the same units, but different classes."""

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
    """Converts a time of eventloop to Composer's; seconds are rounded, which are integers in Composer."""
    value = time.value if time.unit == "dur" else round(time.value)
    return ComposerTime(value, _UNITS[time.unit])


def to_ours(time: ComposerTime) -> Time:
    """Converts a time of Composer to eventloop's.

    Raises:
        ValueError: eventloop has no such unit, `iter`, or the time isn't positive.
    """
    if time.unit not in _NAMES:
        raise ValueError(f"{time} is in {time.unit}, which eventloop doesn't count")
    return Time(time.value, _NAMES[time.unit])


def until(duration: ComposerTime, since: Moment) -> Time:
    """Returns the end, on eventloop's clock, of a duration that Composer counts from a moment.

    Raises:
        ValueError: as in `to_ours`.
    """
    time = to_ours(duration)
    return Time(time.value + getattr(since, FIELDS[time.unit]), time.unit)


@functools.lru_cache(maxsize=16)
def _counted(value: int, unit: str) -> ComposerTime:
    return ComposerTime(value, TimeUnit(unit))


class Evaluated:
    """The seconds of evaluations in a fit, which Composer's training time excludes.

    Attributes:
        in_batch_s: seconds of evaluations between the previous batch and the last batch.
        in_epoch_s: seconds of evaluations since, and immediately before, the epoch's first batch.
    """

    def __init__(self) -> None:
        self.in_batch_s = self.in_epoch_s = 0.0
        self._begun = self._pending_s = 0.0

    def start_fit(self) -> None:
        """Discards evaluations before the fit, which eventloop's clock doesn't count either."""
        self._pending_s = 0.0

    def begin(self) -> None:
        """Starts the time of an evaluation."""
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Ends the time of an evaluation."""
        self._pending_s += time.perf_counter() - self._begun

    def end_batch(self, clock: Clock) -> None:
        """Assigns pending evaluations to the batch that ends now: eventloop's clock counts them to it."""
        self.in_batch_s = self._pending_s
        self._pending_s = 0.0
        self.in_epoch_s = self.in_batch_s + (self.in_epoch_s if clock.batch_in_epoch > 1 else 0.0)


def timestamp_of(clock: Clock, since: Moment, evaluated: Evaluated) -> Timestamp:
    """Returns the clock as Composer's timestamp, counted from `since`, a moment between epochs.

    Its iterations stay 0: eventloop has none, and a run of Composer is a single iteration by default. The
    time of the last batch is 0 after an epoch has ended, as in Composer.
    """
    in_epoch = clock.batch_in_epoch
    moment = clock.moment()
    total = timedelta(seconds=moment.seconds - since.seconds)
    # Cached, because they rarely change and each takes a microsecond to create.
    epoch = _counted(moment.epoch - since.epoch, "ep")
    token = _counted(moment.token - since.token, "tok")
    return Timestamp(
        iteration=_counted(0, "iter"),
        epoch=epoch,
        batch=moment.batch - since.batch,
        sample=moment.sample - since.sample,
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
            seconds=moment.seconds - clock.previous.seconds - evaluated.in_batch_s
            if in_epoch
            else 0
        ),
    )
