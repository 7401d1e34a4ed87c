"""Learning-rate schedules over `Time`: `Task(scheduler=schedules.cosine(warmup="0.05dur"))`.

The rate of a batch is the schedule's value where the clock stands when the batch begins, so the
first has the value at 0. Nothing else counts: a run that is resumed goes on exactly, and one that is
extended, `fit(until="20ep")`, keeps the end of its schedule. A batch without an optimizer step leaves
the rate alone; the next step takes it to where the clock is by then, so that the schedule ends where
the run ends, whatever was skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch.optim import Optimizer

from eventloop.clock import Time
from eventloop.errors import SettingError
from eventloop.task.courses import Course, Schedule
from eventloop.task.plateau import Plateau, Rule
from eventloop.task.schedulers import in_unit, length_in, steps_per_epoch, unit_of

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


def wsd(
    *,
    warmup: str | Time | None = None,
    decay: str | Time = "0.2dur",
    curve: Literal["linear", "cosine", "sqrt"] = "linear",
    final_frac: float = 0.0,
) -> Factory:
    """Returns what makes a schedule of warm-up, a stable rate, and a decay at the end of the run.

    Args:
        warmup: as in `cosine`.
        decay: how long before the end of the run the rate begins to fall.
        curve: how it falls; "sqrt" is 1 minus the square root of the share that is done.
        final_frac: share of the optimizer's rate at the end.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; "sqrt" is Hägele et al. 2024,
    arXiv:2405.18392, section 3.
    """
    if curve not in ("linear", "cosine", "sqrt"):
        raise ValueError(f"curve={curve!r} is none of 'linear', 'cosine', 'sqrt'")
    return Factory(
        curve=curve,
        warmup=_time(warmup),
        end=Time("1dur"),
        cooldown=Time(decay),
        final_frac=final_frac,
        fall_name="decay",
    )


def inverse_sqrt(*, warmup: str | Time) -> Factory:
    """Returns what makes a schedule that falls as 1 over the square root of what is done.

    The run needs no `max_duration`, and may be extended: nothing depends on its end.

    Args:
        warmup: how long the rate rises from 0 to the optimizer's own, in a straight line; after
            four times as long it has fallen to half.

    Raises:
        ValueError: the time makes no sense.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
    """
    return Factory(curve="inverse_sqrt", warmup=Time(warmup), end=None)


def one_cycle(
    *,
    warmup: str | Time = "0.3dur",
    duration: str | Time | None = None,
    start_frac: float = 0.04,
    final_frac: float = 4e-6,
) -> Factory:
    """Returns what makes a schedule that rises and falls along half cosines.

    The optimizer's rate is the highest, in the middle. Momentum stays; torch's `OneCycleLR`
    moves that, too.

    Args:
        warmup: how long the rate rises.
        duration: as in `cosine`.
        start_frac: share of the optimizer's rate at the start.
        final_frac: share of it at the end; the defaults are those of `OneCycleLR`.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Smith & Topin 2018, arXiv:1708.07120, section 2.
    """
    return Factory(
        curve="cosine",
        warmup=Time(warmup),
        end=_time(duration or "1dur"),
        final_frac=final_frac,
        start_frac=start_frac,
        rise="cosine",
    )


def plateau(
    metric: str,
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    final_frac: float = 0.0,
    warmup: str | Time | None = None,
) -> Factory:
    """Returns what makes a schedule that falls whenever a metric has stopped to improve.

    All ranks go by the value of rank 0. Evaluations during the warm-up count as others do.

    Args:
        metric: which one, as `checkpoint_best` takes it: "test/accuracy", "min test/error".
        factor: what the rate is multiplied by, in (0, 1).
        patience: how many evaluations without a better value are put up with.
        threshold: what better means: by this share of the best value so far.
        final_frac: share of the optimizer's rate below which it doesn't fall.
        warmup: as in `cosine`.

    Raises:
        ValueError: a value makes no sense.
    """
    rule = Rule(
        metric=metric, factor=factor, patience=patience, threshold=threshold, final_frac=final_frac
    )
    return Factory(curve="linear", warmup=_time(warmup), end=None, rule=rule)


@dataclass(frozen=True, kw_only=True)
class Factory:
    """Makes a schedule for an optimizer, once the length of the run is known.

    Args:
        curve: how the rate falls, a name in `CURVES`.
        warmup: how long the rate rises from 0; None: it starts at the optimizer's own.
        end: when the fall ends; None: it never begins.
        cooldown: how long the fall takes; None: from the warm-up to the end.
        final_frac, start_frac, rise: as `Course` has them.
        fall_name: what `cooldown` is called in messages.
        rule: when the rate falls by a metric; None: by the clock alone.

    Raises:
        ValueError: a share is outside 0 to 1.
    """

    curve: str
    warmup: Time | None
    end: Time | None
    cooldown: Time | None = None
    final_frac: float = 0.0
    start_frac: float = 0.0
    rise: str = "linear"
    fall_name: str = "cooldown"
    rule: Rule | None = None

    def __post_init__(self) -> None:
        for name in ("start_frac", "final_frac"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} is outside 0 to 1")

    def __call__(self, optimizer: Optimizer, state: State) -> Schedule | Plateau:
        """Makes the schedule of one optimizer.

        Raises:
            SettingError: its times can't be compared, don't fit into each other, or are fractions
                of a length that isn't known.
        """
        if self.rule is not None:
            return Plateau(optimizer, self.rule, self.course(state), state)
        return Schedule(optimizer, self.course(state), state)

    def course(self, state: State) -> Course:
        """Returns the schedule in numbers, for a run of this length.

        Raises:
            SettingError: as above.
        """
        unit = unit_of(self.end or self.warmup or Time("1ba"), state)
        if unit == "ep":
            steps_per_epoch(state)  # within an epoch the position is counted in batches
        rise = length_in("warmup", self.warmup, unit, state) if self.warmup else 0.0
        end = length_in("duration", self.end, unit, state) if self.end else math.inf
        fall = rise if self.end else math.inf
        if self.cooldown:
            fall = end - length_in(self.fall_name, self.cooldown, unit, state)
        run = state.duration
        last = min(end, (run and in_unit(run, unit, state)) or math.inf)
        if rise >= last or fall < rise:
            times = {"warmup": self.warmup, self.fall_name: self.cooldown}
            given = [f"{name}={time}" for name, time in times.items() if time]
            raise SettingError(
                f"{' and '.join(given)} {'leave' if len(given) > 1 else 'leaves'} nothing of a "
                f"schedule that ends at {last:g}{unit}",
                fix='shorten it, to a fraction of the run for example: "0.05dur"',
            )
        return Course(
            self.curve, unit, rise, fall, end, self.final_frac, self.start_frac, self.rise
        )


def _time(given: str | Time | None) -> Time | None:
    return None if given is None else Time(given)
