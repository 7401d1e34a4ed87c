"""Composer's times and ours: the units are the same, the classes aren't."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING

from composer.core import Time as ComposerTime
from composer.core import Timestamp, TimeUnit

from eventloop import Time

if TYPE_CHECKING:
    from eventloop import Clock

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


@functools.lru_cache(maxsize=16)
def _counted(value: int, unit: str) -> ComposerTime:
    return ComposerTime(value, TimeUnit(unit))


def timestamp_of(clock: Clock) -> Timestamp:
    """Returns where our clock stands as Composer's timestamp.

    Its iterations stay 0: we have none, and Composer's own run is a single one unless it is told
    otherwise. The time of the last batch is 0 when an epoch has ended, as theirs is.
    """
    in_epoch = clock.batch_in_epoch
    now = clock.moment()
    total = timedelta(seconds=now.seconds)
    # Made once where they stand for long: each takes a microsecond.
    epoch, token = _counted(now.epoch, "ep"), _counted(now.token, "tok")
    return Timestamp(
        iteration=_counted(0, "iter"),
        epoch=epoch,
        batch=now.batch,
        sample=now.sample,
        token=token,
        epoch_in_iteration=epoch,
        token_in_iteration=token,
        batch_in_epoch=in_epoch,
        sample_in_epoch=clock.sample_in_epoch,
        token_in_epoch=clock.token_in_epoch,
        total_wct=total,
        iteration_wct=total,
        epoch_wct=timedelta(seconds=clock.seconds_in_epoch),
        batch_wct=timedelta(seconds=now.seconds - clock.previous.seconds if in_epoch else 0),
    )
