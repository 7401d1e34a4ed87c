"""Time in units of training: `Time` is a duration or an interval, `Clock` the progress of the run."""

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
# Same as `Moment(*counts)`, without the cost of calling a Python function.
moment_of: Callable[[Counts], Moment] = functools.partial(tuple.__new__, Moment)

FIELDS = {"ep": "epoch", "ba": "batch", "sp": "sample", "tok": "token", "sec": "seconds"}
_IDX = {unit: Moment._fields.index(name) for unit, name in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Time:
    """A length of training: `Time("2ep")`, `Time("10_000ba")`, `Time("1e9tok")`, `Time("0.1dur")`.

    Args:
        value: the text of a number with its unit, or only the number.
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
        number = int(value) if value == int(value) and unit != "sec" else float(value)
        object.__setattr__(self, "value", number)
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
    """The clock in a checkpoint.

    Attributes:
        now: the current counts.
        previous: the counts before the last batch.
        epoch_start: the counts at the start of the current epoch.
    """

    now: SavedCounts
    previous: SavedCounts
    epoch_start: SavedCounts


class Clock:
    """The progress of the run in every unit, now and before the last batch.

    `epoch` is the number of finished epochs; `batch`, `sample`, `token` and `seconds` are the numbers
    of finished batches, samples and tokens, and the time spent on them. All except `epoch` are also
    available within the epoch (`batch_in_epoch`, ...). Only the loop advances the clock, after each
    batch and each epoch, identically on every rank; `seconds` are measured on rank 0.
    """

    __slots__ = ("_epoch_start", "_now", "_previous")

    def __init__(self) -> None:
        # Plain tuples, because creating and reading a Moment takes several times as long. Where the
        # core needs a batch's moment later, it stores `_now`, and converts it with `moment_of`.
        self._now: Counts = (0, 0, 0, 0, 0.0)
        self._previous = self._epoch_start = self._now

    def __repr__(self) -> str:
        return repr(self.moment()).replace("Moment", "Clock", 1)

    def moment(self) -> Moment:
        """Returns the current counts."""
        return moment_of(self._now)

    @property
    def previous(self) -> Moment:
        """The counts before the last batch."""
        return moment_of(self._previous)

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._now[0]

    @property
    def epoch_number(self) -> int:
        """The number of the last batch's epoch, from 1, for output."""
        return max(1, self._now[0] + (self._now[1] > self._epoch_start[1]))

    @property
    def batch(self) -> int:
        """The number of finished batches."""
        return self._now[1]

    @property
    def sample(self) -> int:
        """The number of samples in finished batches."""
        return self._now[2]

    @property
    def token(self) -> int:
        """The number of tokens in finished batches; 0 if the task doesn't count them."""
        return self._now[3]

    @property
    def seconds(self) -> float:
        """The seconds spent on finished batches, as measured on rank 0."""
        return self._now[4]

    @property
    def batch_in_epoch(self) -> int:
        """The number of finished batches in the current epoch."""
        return self._now[1] - self._epoch_start[1]

    @property
    def sample_in_epoch(self) -> int:
        """The number of samples in finished batches of the current epoch."""
        return self._now[2] - self._epoch_start[2]

    @property
    def token_in_epoch(self) -> int:
        """The number of tokens in finished batches of the current epoch."""
        return self._now[3] - self._epoch_start[3]

    @property
    def seconds_in_epoch(self) -> float:
        """The seconds spent on finished batches of the current epoch."""
        return self._now[4] - self._epoch_start[4]

    def end_batch(self, samples: int, tokens: int, seconds: float) -> None:
        """Advances by a batch, with its numbers of samples and tokens and the seconds it took."""
        epoch, batch, sample, token, spent = self._previous = self._now
        self._now = (epoch, batch + 1, sample + samples, token + tokens, spent + seconds)

    def end_epoch(self) -> None:
        """Advances by an epoch; the counts within the epoch restart at 0."""
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
        """Returns whether `time` has elapsed since the start of the run."""
        return self._now[time._idx] >= time.value

    def passed(self, time: Time) -> bool:
        """Returns whether `time` had elapsed before the last batch, so work due then has been done."""
        return self._previous[time._idx] >= time.value

    def crossed(self, interval: Time) -> bool:
        """Returns whether the last batch crossed a multiple of `interval`.

        The end of an epoch doesn't change `previous`, the counts before the last batch. Therefore, a
        multiple that an epoch's last batch has crossed still counts as crossed when the next epoch
        starts.
        """
        idx = interval._idx
        length = interval.value
        return self._now[idx] // length > self._previous[idx] // length


def resolve(time: Time, max_duration: Time | None, num_batches: int | None) -> Time:
    """Returns a time without fractions of a run or an epoch, which a clock can't count.

    Args:
        time: in any unit.
        max_duration: the length of the run, for times in `dur`.
        num_batches: the number of batches in an epoch, if the data loader has a length.

    Raises:
        ValueError: the time is a fraction of an unknown length.
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
    """Returns a suggestion for a message: "write '5ep': " for `5 epochs`."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None:
        return "write "
    word = match[2].lower()
    exact = (unit for unit, words in _WORDS.items() if word in (unit, *words))
    near = (
        unit
        for unit, words in _WORDS.items()
        if word
        and any(
            full_word.startswith(word) or word.startswith(full_word)
            for full_word in words
            if full_word[1:]
        )
    )
    unit = next(itertools.chain(exact, near), "")
    return f"write '{match[1]}{unit}': " if unit else "write "


def _units() -> str:
    return ", ".join(f"{unit} ({meaning})" for unit, meaning in UNITS.items())
