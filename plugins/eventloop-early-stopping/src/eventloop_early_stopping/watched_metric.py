"""What can be watched: the numbers of the eval sets, and the loss in training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eventloop.toolbox import NamedMetric, find_metric, named_metrics

if TYPE_CHECKING:
    from eventloop import StateView

WHAT = "early-stopping.metric"
TRAIN_LOSS = NamedMetric("train/loss", eval_set="", metric="", is_higher=False)


def watched_by(
    name: str | None,
    state: StateView,
    *,
    mode: str = "auto",
    evaluates: bool,
) -> NamedMetric:
    """Returns what a person named, or the first of which is known what is better.

    Args:
        name: as it is logged; of a metric with several results one, `test/f1.micro`.
        state: whose metrics are built.
        mode: min or max where a person said what is better.
        evaluates: whether the run evaluates by itself.

    Raises:
        SettingError: there is nothing of this name.
    """
    if name is None:
        known = named_metrics(state.metrics).values() if evaluates else ()
        sure = (one for one in known if one.is_higher is not None)
        return next((one for one in sure if one.eval_set in state.eval_sets), TRAIN_LOSS)
    if name == TRAIN_LOSS.name:
        return TRAIN_LOSS
    direction = "" if mode == "auto" else f"{mode} "
    return find_metric(WHAT, direction + name, state, also=TRAIN_LOSS.name)
