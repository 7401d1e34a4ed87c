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
        higher_is_better: None if the metric doesn't define it.
    """

    name: str
    higher_is_better: bool | None


def choose_metric(
    requested: str | None,
    directions: Mapping[str, bool | None],
    *,
    test_sets: Collection[str] = (),
    checkpoint_best: str | None = None,
) -> Metric:
    """Returns the requested metric; without a request, `checkpoint_best`'s metric or the only metric.

    Args:
        requested: "test/accuracy", "eval/test/accuracy", "min test/error"; None without `--metric`.
        directions: the metrics that a run ends with, and whether higher is better.
        test_sets: eval sets that must not select anything unless they are requested.
        checkpoint_best: this setting of the runs; None if it isn't set.

    Raises:
        UsageError: no metric has the requested name, or there are several and none was requested.
    """
    if requested is None and checkpoint_best is not None:
        requested = checkpoint_best
    if requested is None:
        return _only_metric(directions, test_sets)
    direction, _, name = requested.strip().rpartition(" ")
    candidates = [name, name.removeprefix("eval/")]
    metric = next((candidate for candidate in candidates if candidate in directions), None)
    if metric is None or direction not in ("", *_DIRECTIONS):
        raise UsageError(
            f"--metric: no metric is named {requested!r}{closest(name, directions)}",
            fix=_options(directions),
        )
    return Metric(metric, _DIRECTIONS.get(direction, directions[metric]))


def _only_metric(directions: Mapping[str, bool | None], test_sets: Collection[str]) -> Metric:
    evaluated = {}
    candidates = {}
    without_loss = {}
    for name, is_higher in directions.items():
        if name.startswith("train/"):
            continue
        evaluated[name] = is_higher
        if name.partition("/")[0] in test_sets:
            continue
        candidates[name] = is_higher
        # The loss of an eval set is always logged; it only counts if the task has no metric.
        if not name.endswith("/loss"):
            without_loss[name] = is_higher
    choices = without_loss or candidates
    if len(choices) == 1:
        ((name, is_higher),) = choices.items()
        return Metric(name, is_higher)
    description = "several metrics"
    if not candidates:
        description = "no metric of eval data"
        if evaluated:
            description = f"no metric except on test sets, {', '.join(sorted(test_sets))}"
    raise UsageError(
        f"the task has {description}", fix=_options(candidates or evaluated or directions)
    )


def _options(directions: Mapping[str, bool | None]) -> str:
    """Returns the `--metric` options to choose from, with both directions if a metric defines none."""
    names: list[str] = []
    for name, is_higher in directions.items():
        names += [name] if is_higher is not None else [f'"max {name}"', f'"min {name}"']
    options = " or ".join(f"`--metric {name}`" for name in names)
    return f"write {options}" if options else "give Task(eval_dataloaders=..., metrics=...)"
