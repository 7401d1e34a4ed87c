"""Learning-rate schedules: curves, rules for metrics, the scheduler that applies them, and ramps."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor
from torch.optim import Optimizer

from eventloop.clock import Time
from eventloop.errors import SettingError, TaskError
from eventloop.task.schedulers import length_in, position, unit_of
from eventloop.training.metrics import NamedMetric, followed

if TYPE_CHECKING:
    from eventloop.state import State
    from eventloop.view import StateView


@dataclass(frozen=True)
class Course:
    """The numbers of a schedule; all times have the same unit and count from the start of the run.

    Args:
        curve: the shape of the decay: a name in `CURVES`, or "inverse_sqrt".
        unit: the unit of the times.
        warmup: the end of the warm-up; 0 for no warm-up.
        fall: the start of the decay; infinite for no decay.
        end: the end of the decay.
        final_frac: fraction of the optimizer's rate at the end.
        start_frac: fraction of the optimizer's rate at the start of the warm-up.
        rise: the shape of the warm-up: a name in `CURVES`.
    """

    curve: str
    unit: str
    warmup: float = 0.0
    fall: float = math.inf
    end: float = math.inf
    final_frac: float = 0.0
    start_frac: float = 0.0
    rise: str = "linear"

    def factor(self, position: float) -> float:
        """Returns the factor on the optimizer's rate at a position of the run."""
        if position < self.warmup:
            frac = position / self.warmup
            if self.rise == "linear" and not self.start_frac:
                return frac  # the general formula has rounding errors
            return 1.0 - (1.0 - self.start_frac) * CURVES[self.rise](frac)
        if self.curve == "inverse_sqrt":
            return math.sqrt(self.warmup / position)
        if position < self.fall:
            return 1.0
        if position >= self.end:
            return self.final_frac
        remaining = CURVES[self.curve]((position - self.fall) / (self.end - self.fall))
        return self.final_frac + (1.0 - self.final_frac) * remaining


# Each curve falls from 1 to 0 while the share of the time rises from 0 to 1.
CURVES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda frac: 0.5 * (1.0 + math.cos(math.pi * frac)),
    "linear": lambda frac: 1.0 - frac,
    "sqrt": lambda frac: 1.0 - math.sqrt(frac),
}
CURVE_NAMES = (*CURVES, "inverse_sqrt")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When the rate falls, and by how much; see `schedules.plateau`.

    Raises:
        ValueError: a value is out of range.
    """

    metric: str
    factor: float
    patience: int
    threshold: float
    final_frac: float

    def __post_init__(self) -> None:
        if not 0.0 < self.factor < 1.0:
            raise ValueError(f"factor={self.factor} is outside 0 to 1")
        if type(self.patience) is not int or self.patience < 0:
            raise ValueError(f"patience={self.patience!r} is not a number of evaluations")
        if not self.threshold >= 0.0:
            raise ValueError(f"threshold={self.threshold} is not a share, 0 or more")
        if not 0.0 <= self.final_frac < 1.0:
            raise ValueError(f"final_frac={self.final_frac} is outside 0 to 1")

    def next(self, progress: Progress, value: float, batch: int, *, is_higher: bool) -> Progress:
        """Returns the history of the metric after another evaluation."""
        if self._is_better(value, progress.best, is_higher=is_higher):
            return Progress(best=value, frac=progress.frac, batch=batch)
        num_bad = progress.num_bad + 1
        frac = progress.frac
        if num_bad > self.patience:
            num_bad = 0
            frac = max(frac * self.factor, min(frac, self.final_frac))
        return Progress(progress.best, num_bad, frac, batch)

    def _is_better(self, value: float, best: float, *, is_higher: bool) -> bool:
        """Returns whether a value is better than the best so far; False for NaN."""
        # Relative to an infinite best value, the margin would be infinite and no value better.
        if math.isinf(best):
            return value > best if is_higher else value < best
        margin = self.threshold * abs(best)
        return value > best + margin if is_higher else value < best - margin


@dataclass(frozen=True)
class Progress:
    """The history of the metric so far.

    Args:
        best: the best value; infinite before the first evaluation.
        num_bad: the number of evaluations since the best value, or since the rate was last reduced.
        frac: the current fraction of the optimizer's rate.
        batch: the batch of the latest evaluation; -1 before the first evaluation.

    Raises:
        ValueError, TypeError: a value is out of range.
    """

    best: float
    num_bad: int = 0
    frac: float = 1.0
    batch: int = -1

    def __post_init__(self) -> None:
        numbers = (self.num_bad, self.batch)
        if not 0.0 <= self.frac <= 1.0 or not all(type(number) is int for number in numbers):
            raise ValueError(f"{self} is not the progress of a metric")
        if not isinstance(self.best, float):
            raise TypeError(f"best is {self.best!r}")


class Schedule:
    """A scheduler with the interface of torch's that computes learning rates from the run's clock.

    Each parameter group keeps its initial rate as `initial_lr`.

    Args:
        optimizer: the optimizer whose rates are set; a rate that is a tensor is changed in place.
        course: the numbers of the schedule.
        state: the state of the run; rank 0 warns if training continues at a rate of 0.
        rule: reduces the rates according to a metric; None to ignore metrics.
    """

    def __init__(
        self, optimizer: Optimizer, course: Course, state: State, rule: Rule | None = None
    ) -> None:
        self.optimizer = optimizer
        self.course = course
        self.rule = rule
        # NaN until `begin` knows whether higher is better.
        self._progress = Progress(best=math.nan)
        self._followed: NamedMetric | None = None
        self._state = state
        self._warns = state.rank == 0
        self._has_ended = False
        self.step()

    def step(self) -> None:
        """Sets the rates for the next batch."""
        current_position = position(self._state.clock, self.course.unit, self._state.num_batches)
        factor = self.course.factor(current_position) * self._progress.frac
        if factor == 0.0 and current_position >= self.course.end:
            self._warn_of_end()
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            # Reading a tensor waits for the device, but only at the first step with this group.
            if "initial_lr" not in group:
                group["initial_lr"] = float(rate)
            if isinstance(rate, Tensor):
                rate.fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor

    def get_last_lr(self) -> list[Any]:
        """Returns the rate of each parameter group, a number or a tensor."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def begin(self, state: State) -> None:
        """Looks up the metric of the rule; called after everything is built and loaded.

        Raises:
            SettingError: no metric has this name, or it is never computed.
        """
        if self.rule is None:
            return
        self._followed = metric = followed("schedules.plateau", self.rule.metric, state)
        if state.settings.eval_interval is None:
            raise SettingError(
                f"schedules.plateau follows {self.rule.metric!r}, but eval_interval is not set, so "
                "it isn't computed during the run",
                fix="set eval_interval, for example to 1ep",
            )
        if math.isnan(self._progress.best):
            self._progress = Progress(best=-math.inf if metric.is_higher else math.inf)

    def observe(self, state: State) -> None:
        """Applies the rule, if any, to the latest evaluation; waits for the device.

        Collective: every rank must call it.
        """
        previous_progress = self._progress
        batch = state.clock.batch
        metric = self._followed
        if self.rule is None or metric is None:
            return
        # `Trainer.evaluate` between two fits repeats the evaluation of the same batch.
        if batch == previous_progress.batch:
            return
        # All ranks use rank 0's value, so that rounding can't give them different rates.
        value, *_ = state.all_gather(metric.value(state.eval_metrics, "schedules.plateau"))
        self._progress = self.rule.next(
            previous_progress, value, batch, is_higher=bool(metric.is_higher)
        )
        has_improved = self._progress.best != previous_progress.best
        if not has_improved:  # so the rates may have to be reduced
            self.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the numbers of the schedule as they were fixed at the start of the run.

        Infinite and default values are left out, except for two that older checkpoints have. With a
        rule, the numbers are in the entry "course", and the history of the metric is in "progress".
        """
        always_saved = ("warmup", "final_frac")
        defaults = {field.name: field.default for field in dataclasses.fields(Course)}
        course = {}
        for name, value in dataclasses.asdict(self.course).items():
            is_needed = name in always_saved or value != defaults[name]
            if is_needed and value != math.inf:  # JSON has no infinity
                course[name] = value
        if self.rule is None:
            return course
        return {"course": course, "progress": dataclasses.asdict(self._progress)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of `state_dict`; the rates are in the optimizer's state.

        Raises:
            TaskError: the state isn't a state of `eventloop.schedules`.
            ValueError, TypeError: the history of the metric is out of range.
        """
        progress = self._progress
        if self.rule is not None:
            progress = Progress(**state_dict["progress"])
            state_dict = state_dict["course"]
        field_names = {field.name for field in dataclasses.fields(Course)}
        has_curves = (
            state_dict.get("curve") in CURVE_NAMES and state_dict.get("rise", "linear") in CURVES
        )
        if not state_dict.keys() <= field_names or "unit" not in state_dict or not has_curves:
            raise TaskError(
                f"the saved state of a scheduler, {', '.join(map(str, state_dict))}, is none of "
                "eventloop.schedules",
                fix="resume with the scheduler with which the run was started",
            )
        self.course = Course(**state_dict)
        self._progress = progress

    def follow(self, course: Course) -> None:
        """Switches to another course from the next batch on."""
        if course != self.course:
            self.course = course
            self.step()

    def _warn_of_end(self) -> None:
        """Warns once, after a batch was trained at a rate of 0.

        The first call is at the end of the schedule itself, where a run usually ends.
        """
        if self._has_ended and self._warns:
            self._warns = False
            warnings.warn(
                f"the learning rate has been 0 since {self.course.end:g}{self.course.unit}, where "
                "the schedule ends: later batches change no weight; set "
                "final_frac=0.1, or a duration as long as the run",
                stacklevel=2,
            )
        self._has_ended = True


@dataclass(frozen=True)
class Ramp:
    """A value that rises linearly from 0 to 1 between two times; created with `between`.

    It depends only on the clock, so resumed runs continue exactly, and all ranks agree.

    Args:
        unit: the unit of the times.
        start: the time until which the value is 0, counted from the start of the run.
        end: the time from which the value is 1.
    """

    unit: str
    start: float
    end: float

    @classmethod
    def between(cls, start: Time | str | None, end: Time | str, state: State) -> Self:
        """Creates a ramp; needs the length of the run, so call it in `after_load` or later.

        Args:
            start: None for the start of the run. Both times can be a fraction of the run, `"0.5dur"`.

        Raises:
            SettingError: a time is a fraction of a run of unknown length, the times can't be compared,
                or `start` isn't before `end`.
        """
        start_time = None if start is None else Time(start)
        end_time = Time(end)
        for time in (end_time, start_time):
            if state.duration is None and time is not None and time.unit == "dur":
                raise SettingError(
                    f"{time} is a fraction of the run, whose max_duration isn't set",
                    fix='set max_duration, for example max_duration="10ep"',
                )
        unit = unit_of(end_time, state)
        start_length = length_in("start", start_time, unit, state) if start_time else 0.0
        end_length = length_in("end", end_time, unit, state)
        if start_length >= end_length:
            raise SettingError(
                f"start={start_time} isn't before end={end_time}",
                fix="set an earlier start or a later end",
            )
        return cls(unit, start_length, end_length)

    def frac(self, state: State | StateView) -> float:
        """Returns the value of the ramp before the next batch, 0 to 1."""
        current_position = position(state.clock, self.unit, state.num_batches)
        return min(1.0, max(0.0, (current_position - self.start) / (self.end - self.start)))
