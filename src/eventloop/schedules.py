"""Learning-rate schedules over `Time`: `Task(scheduler=schedules.cosine(warmup="0.05dur"))`.

The rate of a batch is the schedule's value where the clock stands when the batch begins, so the
first has the value at 0. Nothing else counts: a run that is resumed goes on exactly, and one that is
extended, `fit(until="20ep")`, keeps the end of its schedule. A batch without an optimizer step leaves
the rate alone; the next step takes it to where the clock is by then, so that the schedule ends where
the run ends, whatever was skipped.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop.clock import Clock, Time
from eventloop.errors import SettingError, TaskError
from eventloop.task.lengths import in_unit, length_in, position, unit_of
from eventloop.task.schedulers import steps_per_epoch

if TYPE_CHECKING:
    from eventloop.state import State


def cosine(
    *,
    warmup: str | Time | None = None,
    duration: str | Time | None = None,
    final_frac: float = 0.0,
) -> Factory:
    """Returns what makes a schedule that falls along half a cosine after its warm-up.

    Args:
        warmup: how long the rate rises from 0 to the optimizer's own, in a straight line.
        duration: when the fall ends, counted from the start of the run; not set: with the run.
        final_frac: share of the optimizer's rate at the end, and from there on.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    return Factory(
        curve="cosine", warmup=_time(warmup), end=_time(duration or "1dur"), final_frac=final_frac
    )


def linear(
    *,
    warmup: str | Time | None = None,
    duration: str | Time | None = None,
    final_frac: float = 0.0,
) -> Factory:
    """Returns what makes a schedule that falls in a straight line; all else as in `cosine`."""
    return Factory(
        curve="linear", warmup=_time(warmup), end=_time(duration or "1dur"), final_frac=final_frac
    )


def constant(*, warmup: str | Time | None = None, cooldown: str | Time | None = None) -> Factory:
    """Returns what makes a schedule that stays at the optimizer's rate after its warm-up.

    Args:
        warmup: as in `cosine`.
        cooldown: how long before the end of the run the rate falls to 0, in a straight line; not
            set: it never falls, and the run needs no `max_duration`.

    Raises:
        ValueError: a time makes no sense.

    Source: with a cool-down Hu et al. 2024, arXiv:2404.06395, section 4 (warm-up, stable, decay).
    """
    end = None if cooldown is None else Time("1dur")
    return Factory(curve="linear", warmup=_time(warmup), end=end, cooldown=_time(cooldown))


@dataclass(frozen=True, kw_only=True)
class Factory:
    """Makes a schedule for an optimizer, once the length of the run is known.

    Args:
        curve: how the rate falls, a name in `CURVES`.
        warmup: how long the rate rises from 0; None: it starts at the optimizer's own.
        end: when the fall ends; None: it never begins.
        cooldown: how long the fall takes; None: from the warm-up to the end.
        final_frac: share of the optimizer's rate at the end.

    Raises:
        ValueError: `final_frac` is outside 0 to 1.
    """

    curve: str
    warmup: Time | None
    end: Time | None
    cooldown: Time | None = None
    final_frac: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.final_frac <= 1.0:
            raise ValueError(f"final_frac={self.final_frac} is outside 0 to 1")

    def __call__(self, optimizer: Optimizer, state: State) -> Schedule:
        """Makes the schedule of one optimizer.

        Raises:
            SettingError: its times can't be compared, don't fit into each other, or are fractions
                of a length that isn't known.
        """
        unit = unit_of(self.end or self.warmup or Time("1ba"), state)
        if unit == "ep":
            steps_per_epoch(state)  # within an epoch the position is counted in batches
        course = self._course(unit, state)
        return Schedule(
            optimizer, course, state.clock, lambda: state.num_batches, warns=state.rank == 0
        )

    def _course(self, unit: str, state: State) -> Course:
        rise = length_in("warmup", self.warmup, unit, state) if self.warmup else 0.0
        end = length_in("duration", self.end, unit, state) if self.end else math.inf
        fall = rise if self.end else math.inf
        if self.cooldown:
            fall = end - length_in("cooldown", self.cooldown, unit, state)
        run = state.duration
        last = min(end, (run and in_unit(run, unit, state)) or math.inf)
        if rise >= last or fall < rise:
            times = {"warmup": self.warmup, "cooldown": self.cooldown}
            given = [f"{name}={time}" for name, time in times.items() if time]
            raise SettingError(
                f"{' and '.join(given)} {'leave' if len(given) > 1 else 'leaves'} nothing of a "
                f"schedule that ends at {last:g}{unit}",
                fix='shorten it, to a fraction of the run for example: "0.05dur"',
            )
        return Course(self.curve, unit, rise, fall, end, self.final_frac)


@dataclass(frozen=True)
class Course:
    """A schedule in numbers, all lengths in one unit and counted from the start of the run.

    Args:
        curve: how the rate falls, a name in `CURVES`.
        unit: what the lengths are counted in.
        warmup: when the rate has risen to the optimizer's own; 0: it starts there.
        fall: when it begins to fall; infinite: never.
        end: when it has fallen.
        final_frac: share of the optimizer's rate at the end.
    """

    curve: str
    unit: str
    warmup: float = 0.0
    fall: float = math.inf
    end: float = math.inf
    final_frac: float = 0.0

    def factor(self, position: float) -> float:
        """Returns the share of the optimizer's rate at a position of the run."""
        if position < self.warmup:
            return position / self.warmup
        if position < self.fall:
            return 1.0
        if position >= self.end:
            return self.final_frac
        left = CURVES[self.curve]((position - self.fall) / (self.end - self.fall))
        return self.final_frac + (1.0 - self.final_frac) * left


# What is left of the way down, 1 to 0, after a share of the time.
CURVES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "linear": lambda done: 1.0 - done,
}


class Schedule:
    """Sets an optimizer's learning rates by the clock; steps, saves and loads as torch's do.

    Each group of parameters keeps a rate of its own, that with which it came, as `initial_lr`.

    Args:
        optimizer: whose rates to set; a rate that is a tensor is written in place.
        course: the schedule in numbers.
        clock: where the run is.
        num_batches: returns how many batches the epoch under way has, None if unknown; only
            called for a course in epochs.
        warns: whether to warn where training goes on at a rate that has fallen to 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        course: Course,
        clock: Clock,
        num_batches: Callable[[], int | None],
        *,
        warns: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.course = course
        self._clock = clock
        self._num_batches = num_batches
        self._warns = warns
        self._has_ended = False
        self.step()

    def step(self) -> None:
        """Sets the rates for the batch that comes next."""
        done = position(self._clock, self.course.unit, self._num_batches())
        factor = self.course.factor(done)
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
        """Returns the rate of each group of parameters, a number or a tensor."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule as it was fixed at the start of the run: names and numbers."""
        course = dataclasses.asdict(self.course)
        return {name: value for name, value in course.items() if value != math.inf}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the schedule of another run; the rates come with the optimizer's state.

        Raises:
            TaskError: it is none of these schedules.
        """
        known = state_dict.keys() <= {field.name for field in dataclasses.fields(Course)}
        if not known or state_dict.get("curve") not in CURVES or "unit" not in state_dict:
            raise TaskError(
                f"the saved state of a scheduler, {', '.join(map(str, state_dict))}, is none of "
                "eventloop.schedules",
                fix="resume with the scheduler that the run began with",
            )
        self.course = Course(**state_dict)

    def _warn_of_end(self) -> None:
        """Warns once, when a batch has been trained at a rate that has fallen to 0."""
        if self._has_ended and self._warns:
            self._warns = False
            warnings.warn(
                f"the learning rate has been 0 since {self.course.end:g}{self.course.unit}, where "
                "the schedule ends: what is trained beyond changes no weight; give it "
                "final_frac=0.1, or a duration as long as the run",
                stacklevel=2,
            )
        self._has_ended = True


def _time(given: str | Time | None) -> Time | None:
    return None if given is None else Time(given)
