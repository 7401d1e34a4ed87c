"""Time as training counts it: a `Time` is a duration or an interval, the `Clock` where we are."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from eventloop.forms import COUNT, SECONDS, anything, as_dict, each, from_dict

UNITS = {
    "ep": "epochs",
    "ba": "batches",
    "sp": "samples",
    "tok": "tokens",
    "sec": "seconds",
    "dur": "fraction of the run",
}
_WHOLE = ("ba", "sp", "tok")
_FORM = re.compile(
    r"(?P<value>[0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)(?P<unit>[a-z]+)"
)
_WORDS = {"ep": ("epoch",), "ba": ("batch", "step", "iter"), "sp": ("sample",)}
_WORDS |= {"tok": ("token",), "sec": ("second", "s"), "dur": ("duration",)}


class Moment(NamedTuple):
    """A point of the run: how many epochs, batches, samples, tokens and seconds are done."""

    epoch: int
    batch: int
    sample: int
    token: int
    seconds: float


Counts = tuple[int, int, int, int, float]
# Gives the Moment of counts without a call of Python's, which `Moment(*counts)` is.
moment_of: Callable[[Counts], Moment] = functools.partial(tuple.__new__, Moment)

FIELDS = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token", "sec": "seconds"}
_IDX = {unit: Moment._fields.index(name) for unit, name in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Time:
    """A length of training: `Time("2ep")`, `Time("10_000ba")`, `Time("1e9tok")`, `Time("0.1dur")`.

    Args:
        value: the text of a number with its unit, or the number alone.
        unit: ep, ba, sp, tok, sec, or dur (a fraction of the run); only with a number.

    Raises:
        ValueError: not a finite number above zero with a known unit, or a fraction of a batch,
            sample or token.
    """

    value: float
    unit: str
    _idx: int = field(init=False, repr=False, compare=False)

    def __init__(self, value: str | float | Time, unit: str = "") -> None:
        if isinstance(value, Time):
            unit = value.unit
            value = value.value
        elif isinstance(value, str):
            value, unit = _parse(value)
        if unit not in UNITS:
            raise ValueError(f"{value}{unit} has no unit of time; one of {_units()}")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{value}{unit} isn't a finite number above zero")
        if unit == "dur" and value > 1:
            raise ValueError(f"{value}dur is more than the whole run, which is 1dur")
        if unit in _WHOLE and value != int(value):
            raise ValueError(f"{value}{unit} is not a whole number of {UNITS[unit]}")
        whole = int(value) if value == int(value) and unit != "sec" else float(value)
        object.__setattr__(self, "value", whole)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "_idx", _IDX.get(unit, len(_IDX)))

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    def __repr__(self) -> str:
        return f"Time({str(self)!r})"


def _check_counts(value: Any, path: str) -> None:
    """Checks the epoch, batch, sample, token and seconds of a moment."""
    each(anything, length=5)(value, path)
    *counts, seconds = value
    for idx, count in enumerate(counts):
        COUNT(count, f"{path}[{idx}]")
    SECONDS(seconds, f"{path}[4]")


SavedCounts = Annotated[list[float], _check_counts]


@dataclass(frozen=True)
class ClockState:
    """The clock in a checkpoint: now, a batch ago, and when the epoch under way began."""

    now: SavedCounts
    previous: SavedCounts
    epoch_start: SavedCounts


class Clock:
    """Where the run is, in every unit, and where it was a batch ago.

    `epoch` counts finished epochs; `batch`, `sample`, `token` and `seconds` count what is done;
    each also within the epoch (`batch_in_epoch`, ...). The loop alone moves it, once a batch and
    once an epoch, on every rank alike; `seconds` are rank 0's.
    """

    __slots__ = ("_epoch_start", "_now", "_previous")

    def __init__(self) -> None:
        # Plain tuples: a Moment takes several times as long to make and to read. The core keeps
        # `_now` where it needs a batch's moment later, and `moment_of` makes one of it then.
        self._now: Counts = (0, 0, 0, 0, 0.0)
        self._previous = self._epoch_start = self._now

    def __repr__(self) -> str:
        return repr(self.moment()).replace("Moment", "Clock", 1)

    def moment(self) -> Moment:
        """Returns where the run is now."""
        return moment_of(self._now)

    @property
    def previous(self) -> Moment:
        """Where the run was before the last batch."""
        return moment_of(self._previous)

    @property
    def epoch(self) -> int:
        """Epochs done."""
        return self._now[0]

    @property
    def epoch_number(self) -> int:
        """The number of the last batch's epoch, from 1, as it is shown to people."""
        return max(1, self._now[0] + (self._now[1] > self._epoch_start[1]))

    @property
    def batch(self) -> int:
        """Batches done."""
        return self._now[1]

    @property
    def sample(self) -> int:
        """Samples done."""
        return self._now[2]

    @property
    def token(self) -> int:
        """Tokens done."""
        return self._now[3]

    @property
    def seconds(self) -> float:
        """Seconds spent."""
        return self._now[4]

    @property
    def batch_in_epoch(self) -> int:
        """Batches done in the epoch that is under way."""
        return self._now[1] - self._epoch_start[1]

    @property
    def sample_in_epoch(self) -> int:
        """Samples done in the epoch that is under way."""
        return self._now[2] - self._epoch_start[2]

    @property
    def token_in_epoch(self) -> int:
        """Tokens done in the epoch that is under way."""
        return self._now[3] - self._epoch_start[3]

    @property
    def seconds_in_epoch(self) -> float:
        """Seconds spent in the epoch that is under way."""
        return self._now[4] - self._epoch_start[4]

    def end_batch(self, samples: int, tokens: int, seconds: float) -> None:
        """Moves on by one batch of so many samples and tokens, which took so many seconds."""
        epoch, batch, sample, token, spent = self._previous = self._now
        self._now = (epoch, batch + 1, sample + samples, token + tokens, spent + seconds)

    def end_epoch(self) -> None:
        """Moves on by one epoch; the counts within the epoch start again."""
        epoch, batch, sample, token, seconds = self._now
        self._now = self._epoch_start = (epoch + 1, batch, sample, token, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Returns a `ClockState`."""
        moments = map(list, (self._now, self._previous, self._epoch_start))
        return as_dict(ClockState(*moments))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `ClockState`."""
        saved: Any = from_dict(ClockState, state)
        self._now = tuple(saved.now)
        self._previous = tuple(saved.previous)
        self._epoch_start = tuple(saved.epoch_start)

    def reached(self, time: Time) -> bool:
        """Returns whether `time` is over, counted from the start of the run."""
        return self._now[time._idx] >= time.value

    def passed(self, time: Time) -> bool:
        """Whether `time` was over before the last batch, so that what was due then has been done."""
        return self._previous[time._idx] >= time.value

    def crossed(self, interval: Time) -> bool:
        """Returns whether a multiple of `interval` lies between the previous batch and now.

        `previous` is the clock before the last batch. The end of an epoch doesn't change it: what an
        epoch's last batch crossed still counts as crossed when the next epoch starts.
        """
        idx = interval._idx
        length = interval.value
        return self._now[idx] // length > self._previous[idx] // length


def resolve(time: Time, max_duration: Time | None, num_batches: int | None) -> Time:
    """Returns a time that a clock can count: no fractions of a run, none of an epoch.

    Args:
        max_duration: the length of the run that `dur` is a fraction of.
        num_batches: batches an epoch, where the data loader knows.

    Raises:
        ValueError: a fraction of an unknown length.
    """
    if time.unit == "dur":
        if max_duration is None:
            raise ValueError(f"{time} is a fraction of the run, whose max_duration isn't set")
        value = time.value * max_duration.value
        unit = max_duration.unit
        time = Time(max(1, round(value)) if unit in _WHOLE else value, unit)
    if time.unit == "ep" and time.value != int(time.value):
        if num_batches is None:
            raise ValueError(f"{time} is a fraction of an epoch, but the data loader has no length")
        time = Time(max(1, round(time.value * num_batches)), "ba")
    return time


def _parse(text: str) -> tuple[float, str]:
    match = _FORM.fullmatch(text.strip())
    if match is None or match["unit"] not in UNITS:
        raise ValueError(
            f"{text!r} is not a time; {_suggestion(text)}a number with its unit, one of {_units()}"
        )
    return float(match["value"].replace("_", "")), match["unit"]


def _suggestion(text: str) -> str:
    """Reads `5 epochs` as its writer meant it, for the message alone."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        return "write "
    word = match[2].lower()
    exact = (unit for unit, words in _WORDS.items() if word in (unit, *words))
    near = (
        unit
        for unit, words in _WORDS.items()
        if word and any(one.startswith(word) or word.startswith(one) for one in words if one[1:])
    )
    unit = next(itertools.chain(exact, near), "")
    return f"write '{match[1]}{unit}': " if unit else "write "


def _units() -> str:
    return ", ".join(f"{unit} ({meaning})" for unit, meaning in UNITS.items())
