"""Learning-rate schedules: their curves, their rules for metrics, the scheduler that follows both, and ramps."""

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
    """A schedule as numbers; all lengths are in one unit, counted from the start of the run.

    Args:
        curve: how the rate falls, a name in `CURVES`, or "inverse_sqrt".
        unit: what the lengths are counted in.
        warmup: the end of the warm-up; 0: none.
        fall: when the rate begins to fall; infinite: never.
        end: when it stops falling.
        final_frac: fraction of the optimizer's rate at the end.
        start_frac: fraction of it at the start of the warm-up.
        rise: how it rises, a name in `CURVES`.
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
            done = position / self.warmup
            if self.rise == "linear" and not self.start_frac:
                return done
            return 1.0 - (1.0 - self.start_frac) * CURVES[self.rise](done)
        if self.curve == "inverse_sqrt":
            return math.sqrt(self.warmup / position)
        if position < self.fall:
            return 1.0
        if position >= self.end:
            return self.final_frac
        left = CURVES[self.curve]((position - self.fall) / (self.end - self.fall))
        return self.final_frac + (1.0 - self.final_frac) * left


# What is left of the way, 1 to 0, after a share of the time.
CURVES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
    "sqrt": lambda done: 1.0 - math.sqrt(done),
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

    def next(self, now: Progress, value: float, batch: int, *, is_higher: bool) -> Progress:
        """Returns the history with one more evaluation."""
        if self._is_better(value, now.best, is_higher=is_higher):
            return Progress(best=value, frac=now.frac, batch=batch)
        num_bad = now.num_bad + 1
        frac = now.frac
        if num_bad > self.patience:
            num_bad = 0
            frac = max(frac * self.factor, min(frac, self.final_frac))
        return Progress(now.best, num_bad, frac, batch)

    def _is_better(self, value: float, best: float, *, is_higher: bool) -> bool:
        """Whether a value is better than the best so far; a NaN never is."""
        if math.isinf(best):
            return value > best if is_higher else value < best
        margin = self.threshold * abs(best)
        return value > best + margin if is_higher else value < best - margin


@dataclass(frozen=True)
class Progress:
    """The history of the metric so far.

    Args:
        best: the best value; infinite before the first.
        num_bad: the number of evaluations since then, or since the rate fell.
        frac: the fraction of the optimizer's rate.
        batch: of the last evaluation; -1 before the first.

    Raises:
        ValueError, TypeError: a value is out of range.
    """

    best: float
    num_bad: int = 0
    frac: float = 1.0
    batch: int = -1

    def __post_init__(self) -> None:
        numbers = (self.num_bad, self.batch)
        if not 0.0 <= self.frac <= 1.0 or not all(type(one) is int for one in numbers):
            raise ValueError(f"{self} is not the progress of a metric")
        if not isinstance(self.best, float):
            raise TypeError(f"best is {self.best!r}")


class Schedule:
    """Sets an optimizer's learning rates by the clock; steps, saves and loads as torch's do.

    Each parameter group keeps its initial rate as `initial_lr`.

    Args:
        optimizer: whose rates to set; a rate that is a tensor is changed in place.
        course: the schedule in numbers.
        state: of the run; rank 0 warns if training continues at a rate that has fallen to 0.
        rule: when the rates also fall by a metric, and by how much; None: never.
    """

    def __init__(
        self, optimizer: Optimizer, course: Course, state: State, rule: Rule | None = None
    ) -> None:
        self.optimizer = optimizer
        self.course = course
        self.rule = rule
        self._progress = Progress(best=math.nan)
        self._followed: NamedMetric | None = None
        self._state = state
        self._warns = state.rank == 0
        self._has_ended = False
        self.step()

    def step(self) -> None:
        """Sets the rates for the next batch."""
        done = position(self._state.clock, self.course.unit, self._state.num_batches)
        factor = self.course.factor(done) * self._progress.frac
        if factor == 0.0 and done >= self.course.end:
            self._warn_of_end()
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            if "initial_lr" not in group:  # here for the first time; a tensor is read this once
                group["initial_lr"] = float(rate)
            if isinstance(rate, Tensor):
                rate.fill_(group["initial_lr"] * factor)
            else:
                group["lr"] = group["initial_lr"] * factor

    def get_last_lr(self) -> list[Any]:
        """Returns the rate of each parameter group, a number or a tensor."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def begin(self, state: State) -> None:
        """Looks up the metric of the rule; called after everything was built and loaded.

        Raises:
            SettingError: no metric has this name, or it is never computed.
        """
        if self.rule is None:
            return
        self._followed = metric = followed("schedules.plateau", self.rule.metric, state)
        if state.settings.eval_interval is None:
            raise SettingError(
                f"schedules.plateau follows {self.rule.metric!r}, but eval_interval is not set, so "
                "that it isn't computed while the run lasts",
                fix="set eval_interval to 1ep, say",
            )
        if math.isnan(self._progress.best):
            self._progress = Progress(best=-math.inf if metric.is_higher else math.inf)

    def observe(self, state: State) -> None:
        """With a rule, records an evaluation; waits for the device. Collective: every rank must call it."""
        now = self._progress
        batch = state.clock.batch
        metric = self._followed
        # Evaluated at the same batch: once more, between two fits.
        if self.rule is None or metric is None or batch == now.batch:
            return
        value, *_ = state.all_gather(metric.value(state.eval_metrics, "schedules.plateau"))
        self._progress = self.rule.next(now, value, batch, is_higher=bool(metric.is_higher))
        if self._progress.best == now.best:  # it wasn't better
            self.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the course as it was fixed at the start of the run: names and numbers.

        Infinite and default values are left out, except two that older checkpoints have. With a
        rule, it is the entry "course", and the history of the metric is "progress".
        """
        written = ("warmup", "final_frac")
        defaults = {one.name: one.default for one in dataclasses.fields(Course)}
        course = {
            name: value
            for name, value in dataclasses.asdict(self.course).items()
            if value != math.inf and (name in written or value != defaults[name])
        }
        if self.rule is None:
            return course
        return {"course": course, "progress": dataclasses.asdict(self._progress)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the schedule of another run; the rates are in the optimizer's state.

        Raises:
            TaskError: it is not one of these schedules.
            ValueError, TypeError: the history of the metric is out of range.
        """
        progress = self._progress
        if self.rule is not None:
            progress = Progress(**state_dict["progress"])
            state_dict = state_dict["course"]
        known = state_dict.keys() <= {field.name for field in dataclasses.fields(Course)}
        curve = state_dict.get("curve")
        rise = state_dict.get("rise", "linear")
        if not known or "unit" not in state_dict or rise not in CURVES or curve not in CURVE_NAMES:
            raise TaskError(
                f"the saved state of a scheduler, {', '.join(map(str, state_dict))}, is none of "
                "eventloop.schedules",
                fix="resume with the scheduler that the run began with",
            )
        self.course = Course(**state_dict)
        self._progress = progress

    def follow(self, course: Course) -> None:
        """Switches to another course from the next batch on."""
        if course != self.course:
            self.course = course
            self.step()

    def _warn_of_end(self) -> None:
        """Warns once, after a batch was trained at a rate that has fallen to 0."""
        if self._has_ended and self._warns:
            self._warns = False
            warnings.warn(
                f"the learning rate has been 0 since {self.course.end:g}{self.course.unit}, where "
                "the schedule ends: what is trained beyond changes no weight; give it "
                "final_frac=0.1, or a duration as long as the run",
                stacklevel=2,
            )
        self._has_ended = True


@dataclass(frozen=True)
class Ramp:
    """Rises linearly from 0 to 1 between two times; created with `between`.

    It depends only on the clock, so a resumed run continues exactly, and all ranks agree.

    Args:
        unit: of the times.
        start: 0 until then, counted from the start of the run.
        end: 1 from then on.
    """

    unit: str
    start: float
    end: float

    @classmethod
    def between(cls, start: Time | str | None, end: Time | str, state: State) -> Self:
        """Creates the ramp of a run whose length is known: from `after_load` on.

        Args:
            start: None: the start of the run. Both can be a fraction of the run, `"0.5dur"`.

        Raises:
            SettingError: a time is a fraction of a run whose length isn't known, the two can't be
                compared, or `start` isn't before `end`.
        """
        first = None if start is None else Time(start)
        last = Time(end)
        if state.duration is None and "dur" in (last.unit, first and first.unit):
            raise SettingError(
                f"{last if last.unit == 'dur' else first} is a fraction of the run, whose "
                "max_duration isn't set",
                fix='set max_duration, for example max_duration="10ep"',
            )
        unit = unit_of(last, state)
        begin = length_in("start", first, unit, state) if first else 0.0
        if begin >= (stop := length_in("end", last, unit, state)):
            raise SettingError(
                f"start={first} isn't before end={last}", fix="give an earlier start or a later end"
            )
        return cls(unit, begin, stop)

    def frac(self, state: State | StateView) -> float:
        """Returns the value of the ramp before the next batch, 0 to 1."""
        done = position(state.clock, self.unit, state.num_batches)
        return min(1.0, max(0.0, (done - self.start) / (self.end - self.start)))
