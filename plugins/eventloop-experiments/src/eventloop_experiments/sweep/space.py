"""The search space: ranges and choices of options, as written on a command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop import SettingError
from eventloop.commands import UsageError, flag, fold

if TYPE_CHECKING:
    from optuna.trial import Trial

# Converts a text to an option's type: `convert("task.lr", "1e-3")`.
Convert = Callable[[str, str], Any]
_RANGE = re.compile(r"(log:)?([^:,]+):([^:,]+)(?::([^:,]+))?")
_SINGLE = ("[", "{")  # a list or a mapping isn't a choice between its items
_FIX = "write `1e-4:1e-1`, `log:1e-4:1e-1`, `16:64:16` with a step, or choices `32,64,128`"


@dataclass(frozen=True)
class Dimension:
    """An option and the values that it may take.

    Args:
        name: name of the option, "task.lr"; for a choice of plugins "-p ema".
        low, high: bounds of a range of numbers, inclusive; None for choices.
        step: step between the numbers of a range; None for any number.
        is_log: whether to sample uniformly in the logarithm.
        choices: the values, as typed.
    """

    name: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    is_log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The folded name of the plugin whose option it is; "" for a setting or a choice of plugins."""
        return fold(self.name.rpartition(".")[0])

    @property
    def first(self) -> str:
        """The first value, as typed; for plugins the first value with a plugin switched on."""
        if self.choices:
            return next(
                (choice for choice in self.choices if not choice.startswith("no:")), self.choices[0]
            )
        return str(self.low)

    def suggest(self, trial: Trial) -> str:
        """Samples a trial's value; returns it as typed."""
        if self.choices:
            return str(trial.suggest_categorical(self.name, self.choices))
        low = self.low
        high = self.high
        step = self.step
        if isinstance(low, int) and isinstance(high, int):
            int_step = 1 if step is None else int(step)
            return str(trial.suggest_int(self.name, low, high, step=int_step, log=self.is_log))
        assert low is not None
        assert high is not None
        return repr(trial.suggest_float(self.name, low, high, step=step, log=self.is_log))

    def __str__(self) -> str:
        if self.choices:
            return ", ".join(self.choices)
        numbers = (self.low, self.high) if self.step is None else (self.low, self.high, self.step)
        return ("log:" if self.is_log else "") + ":".join(map(str, numbers))


@dataclass(frozen=True)
class Written:
    """A range or choices as written, before the option's type is known."""

    text: str
    values: tuple[str, ...]
    is_log: bool = False
    is_range: bool = False


def written(text: str) -> Written | None:
    """Parses a text that may be a range or a choice; None for a single value."""
    if text.startswith(_SINGLE):
        return None
    if "," in text:
        return Written(text, tuple(text.split(",")))
    if (match := _RANGE.fullmatch(text)) is None:
        return None
    log, *numbers = match.groups()
    values = tuple(number for number in numbers if number is not None)
    return Written(text, values, is_log=log is not None, is_range=True)


def dimension_of(key: str, range_or_choices: Written, convert: Convert) -> Dimension | None:
    """Returns the range or choices of an option; None if the text is a plain value, such as a URL.

    Raises:
        SettingError, UsageError: the values aren't of the option's type, or make no range.
    """
    text = range_or_choices.text
    if range_or_choices.is_range and not _is_number(key, text, convert):
        return None
    values = [convert(key, value) for value in range_or_choices.values]
    if not range_or_choices.is_range:
        if len(set(range_or_choices.values)) < len(range_or_choices.values):
            raise _refused(key, text, "a choice is there twice")
        return Dimension(key, choices=range_or_choices.values)
    # bool is a subclass of int.
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise _refused(key, text, "it isn't of numbers")
    low, high, step = (*values, None)[:3]
    if not low < high:
        raise _refused(key, text, "its first number isn't less than its second")
    if range_or_choices.is_log and (low <= 0 or step is not None):
        raise _refused(key, text, "a logarithmic range is of positive numbers, with no step")
    if step is not None and not 0 < step <= high - low:
        raise _refused(key, text, "its step doesn't fit into it")
    return Dimension(key, low, high, step, range_or_choices.is_log)


def split_choices(argv: Iterable[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Takes `-p no:ema,ema` out of a command line.

    Returns:
        The remaining command line, and the alternatives.

    Raises:
        UsageError: an alternative is empty, or there aren't two.
    """
    remaining_argv: list[str] = []
    choices = []
    words = iter(argv)
    for word in words:
        if not word.startswith("-p") or word.startswith("--"):
            remaining_argv.append(word)
            continue
        value = word[2:].removeprefix("=") or next(words, "")
        if "," not in value:
            remaining_argv.append(f"-p{value}")
            continue
        choices.append(alternatives(value.split(",")))
    return remaining_argv, choices


def alternatives(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the alternatives of a `-p` option.

    Raises:
        UsageError: an alternative is empty, or there aren't two.
    """
    if not all(values) or len(set(values)) < 2:
        raise UsageError(
            f"-p {','.join(values)} has no two alternatives", fix="write `-p no:ema,ema`"
        )
    return tuple(values)


def plugins_dimension(values: Sequence[str]) -> Dimension:
    """Returns the choice between plugins."""
    names = dict.fromkeys(value.removeprefix("no:") for value in values)
    return Dimension(f"-p {'/'.join(names)}", choices=tuple(values))


def _is_number(key: str, text: str, convert: Convert) -> bool:
    """Whether `16:32` would be parsed as a number, as YAML does, or rejected."""
    try:
        return isinstance(convert(key, text), int | float)
    except SettingError:
        return True


def _refused(key: str, text: str, reason: str) -> UsageError:
    return UsageError(f"{flag(key)} {text} can't be searched: {reason}", fix=_FIX)
