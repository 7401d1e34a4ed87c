"""The metric that a command compares its runs by, and whether higher is better."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def choose_metric(
    wanted: str | None,
    known: Mapping[str, bool | None],
    *,
    test_sets: Collection[str] = (),
    checkpoint_best: str | None = None,
) -> Metric:
    """Finds the metric that was named; else that of `checkpoint_best`, or the only one.

    Args:
        wanted: "test/accuracy", "eval/test/accuracy", "min test/error"; None where it isn't given.
        known: the numbers that a run ends with, and whether higher is better.
        test_sets: eval sets by which nothing may be chosen unless it is named.
        checkpoint_best: the setting of the runs; None where it isn't set.

    Raises:
        UsageError: there is none of that name, or several and none is named.
    """
    if wanted is None and checkpoint_best is not None:
        wanted = checkpoint_best
    if wanted is None:
        return _only_metric(known, test_sets)
    direction, _, name = wanted.strip().rpartition(" ")
    found = next((one for one in (name, name.removeprefix("eval/")) if one in known), None)
    if found is None or direction not in ("", *_DIRECTIONS):
        raise UsageError(
            f"--metric: no metric is named {wanted!r}{closest(name, known)}", fix=_say(known)
        )
    return Metric(found, _DIRECTIONS.get(direction, known[found]))


def _only_metric(known: Mapping[str, bool | None], test_sets: Collection[str]) -> Metric:
    evaluated = {name: one for name, one in known.items() if not name.startswith("train/")}
    candidates = {
        name: one for name, one in evaluated.items() if name.partition("/")[0] not in test_sets
    }
    # The loss stands beside the task's own metrics.
    without_loss = {name: one for name, one in candidates.items() if not name.endswith("/loss")}
    choices = without_loss or candidates
    if len(choices) == 1:
        ((name, is_higher),) = choices.items()
        return Metric(name, is_higher)
    description = "several metrics"
    if not candidates:
        description = "no metric of eval data"
        if evaluated:
            description = f"no metric but those of test sets, {', '.join(sorted(test_sets))}"
    raise UsageError(f"the task has {description}", fix=_say(candidates or evaluated or known))


def _say(known: Mapping[str, bool | None]) -> str:
    """Returns how to name each metric, with both directions where a metric doesn't say which is better."""
    names: list[str] = []
    for name, is_higher in known.items():
        names += [name] if is_higher is not None else [f'"max {name}"', f'"min {name}"']
    options = " or ".join(f"`--metric {name}`" for name in names)
    return f"write {options}" if options else "give Task(eval_dataloaders=..., metrics=...)"
