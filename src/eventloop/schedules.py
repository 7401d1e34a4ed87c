"""Learning-rate schedules over `Time`: `Task(scheduler=schedules.cosine(warmup="0.05dur"))`.

The learning rate of a batch is the schedule's value at the time of the clock when the batch begins, so the
first batch has the value at 0. It depends on nothing else: a resumed run continues exactly, and an extended
run, `fit(until="20ep")`, keeps the end of its schedule. A batch without an optimizer step doesn't change
the rate; the next step sets the rate for the current time, so that the schedule ends with the run even if
steps were skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from torch.optim import Optimizer

from eventloop.clock import Time
from eventloop.errors import SettingError
from eventloop.task.schedule_curves import Course, Rule, Schedule
from eventloop.task.schedulers import in_unit, length_in, steps_per_epoch, unit_of

if TYPE_CHECKING:
    from eventloop.state import State

    # Of the optimizer and the State.
    Maker = Callable[[Optimizer, State], Schedule]


def cosine(
    *,
    warmup: str | Time | None = None,
    duration: str | Time | None = None,
    final_frac: float = 0.0,
) -> Maker:
    """Returns a function that makes a schedule: the rate falls along half a cosine after its warm-up.

    Args:
        warmup: how long the rate rises linearly from 0 to the optimizer's rate.
        duration: when the fall ends, counted from the start of the run; None: at the end of the run.
        final_frac: share of the optimizer's rate at the end, and afterwards.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Loshchilov & Hutter 2017, arXiv:1608.03983, equation 5, without restarts.
    """
    return _maker("cosine", warmup=warmup, end=duration or "1dur", final_frac=final_frac)


def linear(
    *,
    warmup: str | Time | None = None,
    duration: str | Time | None = None,
    final_frac: float = 0.0,
) -> Maker:
    """Returns a function that makes a schedule: the rate falls linearly; otherwise like `cosine`."""
    return _maker("linear", warmup=warmup, end=duration or "1dur", final_frac=final_frac)


def constant(*, warmup: str | Time | None = None, cooldown: str | Time | None = None) -> Maker:
    """Returns a function that makes a schedule: the optimizer's rate, constant after the warm-up.

    Args:
        warmup: as in `cosine`.
        cooldown: how long before the end of the run the rate falls linearly to 0; None: it never
            falls, and the run needs no `max_duration`.

    Raises:
        ValueError: a time makes no sense.

    Source: with a cool-down Hu et al. 2024, arXiv:2404.06395, section 4 (warm-up, stable, decay).
    """
    end = None if cooldown is None else "1dur"
    return _maker("linear", warmup=warmup, end=end, cooldown=cooldown)


def wsd(
    *,
    warmup: str | Time | None = None,
    decay: str | Time = "0.2dur",
    curve: Literal["linear", "cosine", "sqrt"] = "linear",
    final_frac: float = 0.0,
) -> Maker:
    """Returns a function that makes a schedule: warm-up, stable rate, decay at the end of the run.

    Args:
        warmup: as in `cosine`.
        decay: how long before the end of the run the rate begins to fall.
        curve: how the rate falls; "sqrt" is 1 minus the square root of the completed share.
        final_frac: share of the optimizer's rate at the end.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; "sqrt" is Hägele et al. 2024,
    arXiv:2405.18392, section 3.
    """
    if curve not in ("linear", "cosine", "sqrt"):
        raise ValueError(f"curve={curve!r} is none of 'linear', 'cosine', 'sqrt'")
    decay = Time(decay)
    return _maker(
        curve, warmup=warmup, end="1dur", cooldown=decay, final_frac=final_frac, fall_name="decay"
    )


def inverse_sqrt(*, warmup: str | Time) -> Maker:
    """Returns a function that makes a schedule: the rate falls with 1 over the square root of the time.

    The run needs no `max_duration`, and may be extended: the schedule doesn't depend on its end.

    Args:
        warmup: how long the rate rises linearly from 0 to the optimizer's rate; at four times this
            time, it has fallen to half.

    Raises:
        ValueError: the time makes no sense.

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 3.
    """
    return _maker("inverse_sqrt", warmup=Time(warmup), end=None)


def one_cycle(
    *,
    warmup: str | Time = "0.3dur",
    duration: str | Time | None = None,
    start_frac: float = 0.04,
    final_frac: float = 4e-6,
) -> Maker:
    """Returns a function that makes a schedule: the rate rises and falls along half cosines.

    The optimizer's rate is the maximum, after the warm-up. The momentum is constant; torch's
    `OneCycleLR` changes it, too.

    Args:
        warmup: how long the rate rises.
        duration: as in `cosine`.
        start_frac: share of the optimizer's rate at the start.
        final_frac: share of it at the end; both defaults are the same as in `OneCycleLR`.

    Raises:
        ValueError: a time or a share makes no sense.

    Source: Smith & Topin 2018, arXiv:1708.07120, section 2.
    """
    return _maker(
        "cosine",
        warmup=Time(warmup),
        end=duration or "1dur",
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
) -> Maker:
    """Returns a function that makes a schedule: the rate falls when a metric has stopped improving.

    All ranks use the value of rank 0. Evaluations during the warm-up count, too.

    Args:
        metric: the metric, in the format of `checkpoint_best`: "test/accuracy", "min test/error".
        factor: the rate is multiplied by this factor, in (0, 1).
        patience: number of evaluations without a better value before the rate falls.
        threshold: a value is better if it improves the best value by more than this share of it.
        final_frac: the rate doesn't fall below this share of the optimizer's rate.
        warmup: as in `cosine`.

    Raises:
        ValueError: a value makes no sense.
    """
    rule = Rule(
        metric=metric, factor=factor, patience=patience, threshold=threshold, final_frac=final_frac
    )
    return _maker("linear", warmup=warmup, end=None, rule=rule)


def _maker(
    curve: str,
    *,
    warmup: str | Time | None,
    end: str | Time | None,
    cooldown: str | Time | None = None,
    final_frac: float = 0.0,
    start_frac: float = 0.0,
    rise: str = "linear",
    fall_name: str = "cooldown",
    rule: Rule | None = None,
) -> Maker:
    """Returns a function that makes a schedule for an optimizer, when the run's length is known.

    Args:
        curve, final_frac, start_frac, rise: as in `Course`.
        warmup: how long the rate rises; None: it starts at the optimizer's rate.
        end: when the fall ends; None: it never begins.
        cooldown: how long the fall takes; None: from the warm-up to the end.
        fall_name: the name of `cooldown` in messages.
        rule: as in `Schedule`.

    Raises:
        ValueError: a time makes no sense, or a share is outside 0 to 1.
    """
    for name, frac in (("start_frac", start_frac), ("final_frac", final_frac)):
        if not 0.0 <= frac <= 1.0:
            raise ValueError(f"{name}={frac} is outside 0 to 1")
    rises = None if warmup is None else Time(warmup)
    ends = None if end is None else Time(end)
    falls = None if cooldown is None else Time(cooldown)

    def schedule(optimizer: Optimizer, state: State) -> Schedule:
        unit = unit_of(ends or rises or Time("1ba"), state)
        if unit == "ep":
            steps_per_epoch(state)  # within an epoch the position is counted in batches
        top = length_in("warmup", rises, unit, state) if rises else 0.0
        stop = length_in("duration", ends, unit, state) if ends else math.inf
        fall = top if ends else math.inf
        if falls:
            fall = stop - length_in(fall_name, falls, unit, state)
        run = state.duration
        schedule_end = min(stop, (run and in_unit(run, unit, state)) or math.inf)
        if top >= schedule_end or fall < top:
            times = {"warmup": rises, fall_name: falls}
            settings = [f"{name}={time}" for name, time in times.items() if time]
            raise SettingError(
                f"{' and '.join(settings)} {'leave' if len(settings) > 1 else 'leaves'} nothing of a "
                f"schedule that ends at {schedule_end:g}{unit}",
                fix='shorten it, to a fraction of the run for example: "0.05dur"',
            )
        course = Course(curve, unit, top, fall, stop, final_frac, start_frac, rise)
        return Schedule(optimizer, course, state, rule)

    return schedule
