"""A schedule that follows a metric: the learning rate falls when it has stopped to improve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from eventloop.errors import SettingError
from eventloop.task.courses import Course, Schedule
from eventloop.training.metrics import NamedMetric, followed

if TYPE_CHECKING:
    from eventloop.state import State

_WHAT = "schedules.plateau"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When the rate falls, and by how much; see `schedules.plateau`.

    Raises:
        ValueError: a value makes no sense.
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

    def is_better(self, value: float, best: float, *, is_higher: bool) -> bool:
        """Whether a value is better than the best so far; a NaN never is."""
        if math.isinf(best):
            return value > best if is_higher else value < best
        margin = self.threshold * abs(best)
        return value > best + margin if is_higher else value < best - margin


@dataclass(frozen=True)
class Progress:
    """What is known of the metric so far.

    Args:
        best: the best value; infinite before the first.
        num_bad: how many evaluations have come since without a better one.
        frac: share of the optimizer's rate.
        batch: of the last evaluation; -1 before the first.
    """

    best: float
    num_bad: int = 0
    frac: float = 1.0
    batch: int = -1


class Plateau:
    """Lowers a schedule's rates by a metric; steps, saves and loads as torch's do.

    Args:
        optimizer: whose rates to set.
        rule: when they fall.
        course: how they rise before.
        state: of the run.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule, course: Course, state: State) -> None:
        self.optimizer, self.rule = optimizer, rule
        self._schedule = Schedule(optimizer, course, state)
        self.step, self.get_last_lr = self._schedule.step, self._schedule.get_last_lr
        self._progress = Progress(best=math.nan)
        self._followed: NamedMetric | None = None

    @property
    def course(self) -> Course:
        """How the rates rise before."""
        return self._schedule.course

    def begin(self, state: State) -> None:
        """Finds the metric; called when all is built and loaded.

        Raises:
            SettingError: there is none of this name, or it is never computed.
        """
        self._followed = followed(_WHAT, self.rule.metric, state)
        if state.settings.eval_interval is None:
            raise SettingError(
                f"schedules.plateau follows {self.rule.metric!r}, but eval_interval is not set, so "
                "that it isn't computed while the run lasts",
                fix="set eval_interval to 1ep, say",
            )
        if math.isnan(self._progress.best):
            worst = -math.inf if self._followed.is_higher else math.inf
            self._progress = dataclasses.replace(self._progress, best=worst)

    def observe(self, state: State) -> None:
        """Takes up an evaluation; collective: every rank must call it. Waits for the device."""
        now, batch = self._progress, state.clock.batch
        if batch == now.batch:  # it was evaluated once more, between two fits
            return
        metric = self._followed
        assert metric is not None
        value, *_ = state.all_gather(metric.value(state.eval_metrics, _WHAT))
        if self.rule.is_better(value, now.best, is_higher=bool(metric.is_higher)):
            self._progress = Progress(best=value, frac=now.frac, batch=batch)
            return
        num_bad, frac = now.num_bad + 1, now.frac
        if num_bad > self.rule.patience:
            num_bad, frac = 0, max(frac * self.rule.factor, min(frac, self.rule.final_frac))
        self._progress = Progress(now.best, num_bad, frac, batch)
        self._schedule.share = frac
        self.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the warm-up as it was fixed at the start of the run, and the progress so far."""
        progress = dataclasses.asdict(self._progress)
        return {"course": self._schedule.state_dict(), "progress": progress}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; the rates come with the optimizer's state.

        Raises:
            TaskError: the warm-up is none of these schedules.
            ValueError: a number makes no sense.
        """
        course, progress = state_dict["course"], Progress(**state_dict["progress"])
        numbers = (progress.num_bad, progress.batch)
        if not 0.0 <= progress.frac <= 1.0 or not all(type(one) is int for one in numbers):
            raise ValueError(f"{progress} is not the progress of a metric")
        if not isinstance(progress.best, float):
            raise TypeError(f"best is {progress.best!r}")
        self._schedule.load_state_dict(course)
        self._progress, self._schedule.share = progress, progress.frac
