"""The metrics that can be watched: numbers of eval sets, and the training loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.toolbox import NamedMetric, find_metric, named_metrics

if TYPE_CHECKING:
    from eventloop import StateView

OPTION = "early-stopping.metric"
TRAIN_LOSS = NamedMetric("train/loss", eval_set="", metric="", is_higher=False)


def watched_by(
    name: str | None,
    state: StateView,
    *,
    mode: str = "auto",
    evaluates: bool,
) -> NamedMetric:
    """Returns the named metric, or the first metric that defines whether higher is better.

    Args:
        name: name in the log; for a metric with several results a single one, `test/f1.micro`.
        state: the run's state, with its metrics.
        mode: "min" or "max" if the user gave it, else "auto".
        evaluates: whether the run evaluates at an interval.

    Raises:
        SettingError: there is no such metric.
    """
    if name is None:
        candidates = named_metrics(state.metrics).values() if evaluates else ()
        for metric in candidates:
            if metric.is_higher is not None and metric.eval_set in state.eval_sets:
                return metric
        return TRAIN_LOSS
    if name == TRAIN_LOSS.name:
        return TRAIN_LOSS
    direction = "" if mode == "auto" else f"{mode} "
    return find_metric(OPTION, direction + name, state, also=TRAIN_LOSS.name)
