"""The metric that a command compares its runs by, and whether higher is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from eventloop.commands import UsageError, closest

_DIRECTIONS = {"min": False, "max": True}


@dataclass(frozen=True)
class Metric:
    """A metric.

    Args:
        name: as `fit --result` writes it, "test/accuracy".
        higher_is_better: None where the metric doesn't say.
    """

    name: str
    higher_is_better: bool | None


def choose_metric(wanted: str | None, known: Mapping[str, bool | None]) -> Metric:
    """Finds the metric that was named, or the only one.

    Args:
        wanted: "test/accuracy", "eval/test/accuracy", "min test/error"; None where it isn't given.
        known: the numbers that a run ends with, and whether higher is better.

    Raises:
        UsageError: there is none of that name, or several and none is named.
    """
    if wanted is None:
        evaluated = [name for name in known if not name.startswith("train/")]
        # The loss stands beside the task's own metrics.
        own = [name for name in evaluated if not name.endswith("/loss")] or evaluated
        if len(own) == 1:
            return Metric(own[0], known[own[0]])
        what = "several metrics" if evaluated else "no metric of eval data"
        raise UsageError(f"the task has {what}", fix=_say(evaluated or [*known]))
    direction, _, name = wanted.strip().rpartition(" ")
    found = next((one for one in (name, name.removeprefix("eval/")) if one in known), None)
    if found is None or direction not in ("", *_DIRECTIONS):
        raise UsageError(
            f"--metric: no metric is named {wanted!r}{closest(name, known)}", fix=_say([*known])
        )
    return Metric(found, _DIRECTIONS.get(direction, known[found]))


def _say(names: list[str]) -> str:
    options = " or ".join(f"`--metric {name}`" for name in names)
    return f"write {options}" if options else "give Task(eval_dataloaders=..., metrics=...)"
