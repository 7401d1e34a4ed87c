"""The course of a schedule in numbers, and what sets an optimizer's learning rates by it."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from eventloop.errors import TaskError
from eventloop.task.schedulers import position

if TYPE_CHECKING:
    from eventloop.state import State


@dataclass(frozen=True)
class Course:
    """A schedule in numbers, all lengths in one unit and counted from the start of the run.

    Args:
        curve: how the rate falls, a name in `CURVES`, or "inverse_sqrt".
        unit: what the lengths are counted in.
        warmup: when the rate has risen to the optimizer's own; 0: it starts there.
        fall: when it begins to fall; infinite: never.
        end: when it has fallen.
        final_frac: share of the optimizer's rate at the end.
        start_frac: share of it at the start of the warm-up.
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
        """Returns the share of the optimizer's rate at a position of the run."""
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


class Schedule:
    """Sets an optimizer's learning rates by the clock; steps, saves and loads as torch's do.

    Each group of parameters keeps a rate of its own, that with which it came, as `initial_lr`.

    Args:
        optimizer: whose rates to set; a rate that is a tensor is written in place.
        course: the schedule in numbers.
        state: of the run; rank 0 warns where training goes on at a rate that has fallen to 0.

    Attributes:
        share: of the rates that the course has, what is set.
    """

    def __init__(self, optimizer: Optimizer, course: Course, state: State) -> None:
        self.optimizer, self.course, self.share = optimizer, course, 1.0
        self._state = state
        self._warns = state.rank == 0
        self._has_ended = False
        self.step()

    def step(self) -> None:
        """Sets the rates for the batch that comes next."""
        done = position(self._state.clock, self.course.unit, self._state.num_batches)
        factor = self.course.factor(done) * self.share
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
        """Returns the course as it was fixed at the start of the run: names and numbers.

        Those that are infinite or the default are left out, but for two that older checkpoints have.
        """
        kept = ("warmup", "final_frac")
        defaults = {one.name: one.default for one in dataclasses.fields(Course)}
        return {
            name: value
            for name, value in dataclasses.asdict(self.course).items()
            if value != math.inf and (name in kept or value != defaults[name])
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over the schedule of another run; the rates come with the optimizer's state.

        Raises:
            TaskError: it is none of these schedules.
        """
        known = state_dict.keys() <= {field.name for field in dataclasses.fields(Course)}
        curve, rise = state_dict.get("curve"), state_dict.get("rise", "linear")
        if not known or "unit" not in state_dict or rise not in CURVES or curve not in CURVE_NAMES:
            raise TaskError(
                f"the saved state of a scheduler, {', '.join(map(str, state_dict))}, is none of "
                "eventloop.schedules",
                fix="resume with the scheduler that the run began with",
            )
        self.course = Course(**state_dict)

    def follow(self, course: Course) -> None:
        """Follows another course from the next batch on."""
        if course != self.course:
            self.course = course
            self.step()

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
