"""What can be watched: the metrics of the eval sets, and the loss in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor
from torchmetrics import Metric

from eventloop import PluginError, SettingError
from eventloop.toolbox.messages import closest

TRAIN_LOSS = "train/loss"


class Watched(NamedTuple):
    """A number that can be watched.

    Args:
        name: as it is logged.
        is_higher: whether higher is better; None if that isn't known.
        dataset: the name of the eval data loader; "" for the loss in training.
        metric: the name of its result.
    """

    name: str
    is_higher: bool | None
    dataset: str = ""
    metric: str = ""

    def value(self, results: Mapping[str, Mapping[str, Tensor]]) -> float:
        """Reads the latest value of a metric; waits for the device.

        Args:
            results: by data loader and name, one value each.

        Raises:
            PluginError: there is none of this name, or it is more than one number.
        """
        found = results[self.dataset]
        if self.metric not in found:
            names = ", ".join(f"eval/{self.dataset}/{name}" for name in found)
            raise PluginError(
                f"early-stopping watches {self.name!r}, but the evaluation gave {names}",
                fix="name one of these with `--early-stopping.metric`",
            )
        value = found[self.metric]
        if value.numel() != 1:
            raise PluginError(
                f"early-stopping watches {self.name!r}, which is a tensor of shape "
                f"{tuple(value.shape)}, not one number",
                fix="name another metric with `--early-stopping.metric`, or average this one",
            )
        return float(value)


def watchable(metrics: Mapping[str, Mapping[str, Metric]]) -> dict[str, Watched]:
    """Returns what can be watched by its name in the log.

    Args:
        metrics: by data set, "train" or "eval/NAME".
    """
    found = [
        Watched(f"{dataset}/{name}", metric.higher_is_better, dataset.removeprefix("eval/"), name)
        for dataset, several in metrics.items()
        if dataset.startswith("eval/")
        for name, metric in several.items()
    ]
    return {one.name: one for one in (*found, Watched(TRAIN_LOSS, is_higher=False))}


def watched_by(name: str | None, known: Mapping[str, Watched], *, evaluates: bool) -> Watched:
    """Returns what a person named, or the first of which is known what is better.

    Args:
        name: as it is logged; of a metric with several results one, `eval/test/f1.micro`.
        known: from `watchable`.
        evaluates: whether the run evaluates by itself.

    Raises:
        SettingError: there is nothing of this name.
    """
    if name is None:
        sure = (one for one in known.values() if one.is_higher is not None)
        return next((one for one in sure if evaluates or not one.dataset), known[TRAIN_LOSS])
    if name in known:
        return known[name]
    whole, _, part = name.rpartition(".")
    if whole in known and known[whole].dataset:
        one = known[whole]
        return one._replace(name=name, metric=f"{one.metric}.{part}")
    raise SettingError(
        f"early-stopping: no metric is named {name!r}{closest(name, known)}",
        fix=f"name one of {', '.join(known)}",
    )
