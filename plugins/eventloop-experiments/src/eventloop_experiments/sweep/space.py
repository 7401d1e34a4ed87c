"""What is searched: ranges and choices of options, as they are written on a command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventloop import SettingError
from eventloop.commands import UsageError, flag, fold

if TYPE_CHECKING:
    from optuna.trial import Trial

# What a text means for an option: `convert("task.lr", "1e-3")`.
Convert = Callable[[str, str], Any]
_RANGE = re.compile(r"(log:)?([^:,]+):([^:,]+)(?::([^:,]+))?")
_SINGLE = ("[", "{")  # a list or a mapping is one value
_FIX = "write `1e-4:1e-1`, `log:1e-4:1e-1`, `16:64:16` with a step, or choices `32,64,128`"


@dataclass(frozen=True)
class Dimension:
    """An option and the values that it may take.

    Args:
        name: of the option, "task.lr"; of a choice of plugins "-p ema".
        low, high: of a range of numbers; both are in it. None for choices.
        step: between the numbers of a range; None for any.
        is_log: whether the logarithm is drawn evenly.
        choices: as they are typed.
    """

    name: str
    low: float | None = None
    high: float | None = None
    step: float | None = None
    is_log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The plugin that it is an option of, folded; "" for a setting or a choice of plugins."""
        return fold(self.name.rpartition(".")[0])

    @property
    def first(self) -> str:
        """Its first value, as it is typed; of plugins the one with most of them."""
        if self.choices:
            return next((one for one in self.choices if not one.startswith("no:")), self.choices[0])
        return str(self.low)

    def suggest(self, trial: Trial) -> str:
        """Returns a trial's value, as it is typed."""
        if self.choices:
            return str(trial.suggest_categorical(self.name, self.choices))
        low = self.low
        high = self.high
        step = self.step
        if isinstance(low, int) and isinstance(high, int):
            whole = 1 if step is None else int(step)
            return str(trial.suggest_int(self.name, low, high, step=whole, log=self.is_log))
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
    """A range or choices as they were written for an option, whose type isn't known yet."""

    text: str
    parts: tuple[str, ...]
    is_log: bool = False
    is_range: bool = False


def written(text: str) -> Written | None:
    """Reads what may be a range or a choice; None where it is a single value."""
    if text.startswith(_SINGLE):
        return None
    if "," in text:
        return Written(text, tuple(text.split(",")))
    if (found := _RANGE.fullmatch(text)) is None:
        return None
    log, *parts = found.groups()
    numbers = tuple(part for part in parts if part is not None)
    return Written(text, numbers, is_log=log is not None, is_range=True)


def dimension(key: str, found: Written, convert: Convert) -> Dimension | None:
    """Returns the range or choices of an option; None if the text is a plain value, such as a URL.

    Raises:
        SettingError, UsageError: the values aren't of the option's type, or make no range.
    """
    if found.is_range and not _is_number(key, found.text, convert):
        return None
    values = [convert(key, part) for part in found.parts]
    if not found.is_range:
        if len(set(found.parts)) < len(found.parts):
            raise _refused(key, found.text, "a choice is there twice")
        return Dimension(key, choices=found.parts)
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        raise _refused(key, found.text, "it isn't of numbers")
    low, high, step = (*values, None)[:3]
    if not low < high:
        raise _refused(key, found.text, "its first number isn't less than its second")
    if found.is_log and (low <= 0 or step is not None):
        raise _refused(key, found.text, "a logarithmic range is of positive numbers, with no step")
    if step is not None and not 0 < step <= high - low:
        raise _refused(key, found.text, "its step doesn't fit into it")
    return Dimension(key, low, high, step, found.is_log)


def split_choices(argv: Iterable[str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Takes `-p no:ema,ema` out of a command line.

    Returns:
        The rest, and the alternatives.

    Raises:
        UsageError: an alternative is empty, or there is only one.
    """
    rest: list[str] = []
    choices = []
    words = iter(argv)
    for word in words:
        if not word.startswith("-p") or word.startswith("--"):
            rest.append(word)
            continue
        value = word[2:].removeprefix("=") or next(words, "")
        if "," not in value:
            rest.append(f"-p{value}")
            continue
        choices.append(alternatives(value.split(",")))
    return rest, choices


def alternatives(values: Sequence[str]) -> tuple[str, ...]:
    """Returns the alternatives of one `-p`.

    Raises:
        UsageError: one is empty, or there is only one.
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
    """Whether an option takes a range for a number, as YAML does for 16:32, or not at all."""
    try:
        return isinstance(convert(key, text), int | float)
    except SettingError:
        return True


def _refused(key: str, text: str, why: str) -> UsageError:
    return UsageError(f"{flag(key)} {text} can't be searched: {why}", fix=_FIX)
