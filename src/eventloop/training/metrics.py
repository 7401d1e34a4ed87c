"""Metrics: a task's copies for each data set, functions as metrics, and what their names mean."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from eventloop.devices import kind_of
from eventloop.errors import SettingError, TaskError, a, closest
from eventloop.training.running_means import Number, weighted
from eventloop.training.target_shapes import watched_once

if TYPE_CHECKING:
    import torch.distributed as dist
    from torchmetrics import Metric

    from eventloop.state import State
    from eventloop.view import StateView

EVAL = "eval/"
_OF_TRAINING = ("train", "lr")


def is_metric(value: Any) -> bool:
    """Whether a value is a `torchmetrics.Metric`, or has what one has; doesn't import torchmetrics."""
    return not isinstance(value, type) and hasattr(value, "metric_state")


def metric_parts(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics and the metrics that they contain, with their names."""
    for name, metric in metrics.items():
        contained = metric.named_modules() if isinstance(metric, nn.Module) else [("", metric)]
        for path, one in contained:
            if is_metric(one):
                yield f"{name}.{path}".rstrip("."), one


def predictions(outputs: Any) -> Any:
    """Returns what metrics receive: `outputs.logits` where it exists, else the outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def loss_in(outputs: Any) -> Any:
    """Returns the loss that outputs have themselves: `.loss`, or the key "loss"; None without."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def compute(metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
    """Computes metrics, each a tensor on its device; several results of one get dotted names.

    Raises:
        TaskError: a metric's result has something other than tensors.
    """
    results: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(value := metric.compute(), Mapping):
            results |= {f"{name}.{key}": part for key, part in value.items()}
        else:
            results[name] = value
    for name, value in results.items():
        if not isinstance(value, Tensor):
            raise TaskError(f"metric {name!r} gave a {type(value).__name__}, not a tensor")
    return results


def log_train_metrics(state: State) -> None:
    """Logs the metrics of training since they were last logged, and empties them."""
    if state.world_size > 1 and not state.even_batches:
        _take_part(state)
    counted = {name: one for name, one in state.metrics["train"].items() if one.update_called}
    results = compute(counted)
    state.train_metrics |= results
    for name, value in results.items():
        if value.numel() == 1:
            state.log(f"train/{name}", value)
    for metric in counted.values():
        metric.reset()


def _take_part(state: State) -> None:
    """Has metrics that only other ranks have updated take part in the collectives of `compute`."""
    metrics = dict(metric_parts(state.metrics["train"]))
    mine = {name: _lists_of(one) for name, one in metrics.items() if one.update_called}
    of_any = {name: lists for each in state.all_gather(mine) for name, lists in each.items()}
    for name in of_any.keys() - mine.keys():
        one = metrics[name]
        one._update_count = 1  # private, or torchmetrics warns (1.9)
        for field, (dtype, shape) in of_any[name].items():
            setattr(one, field, [torch.empty(0, *shape, dtype=dtype, device=one.device)])


def _lists_of(metric: Metric) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns type and shape, without the first dimension, of each list of tensors in the state."""
    lists = {key: one for key, one in metric.metric_state.items() if isinstance(one, list) and one}
    return {key: (tensors[0].dtype, tuple(tensors[0].shape[1:])) for key, tensors in lists.items()}


def metric_name(eval_set: str, metric: str) -> str:
    """Returns the name of a number of an eval set, wherever it is written: test/accuracy.

    Of a set that is called as the numbers of training begin, it is eval/train/accuracy.
    """
    name = f"{eval_set}/{metric}"
    return f"{EVAL}{name}" if eval_set in _OF_TRAINING else name


def scalars_of(
    results: Mapping[str, Mapping[str, Tensor]], only: Collection[str] | None = None
) -> dict[str, float]:
    """Returns what is one number of the results of eval sets, of these `only`; waits for the device."""
    return {
        metric_name(eval_set, name): value.item() if isinstance(value, Tensor) else value
        for eval_set, values in results.items()
        if only is None or eval_set in only
        for name, value in values.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


class MeanOf:
    """The mean of what a function returns for each batch, added up in float64 on the device.

    It has what the core uses of a `torchmetrics.Metric`, whose import takes longer than torch's.

    Args:
        what: it is, for messages: "metric 'error'".
        function: takes outputs and targets; returns a tensor of shape (), the mean over the batch,
            or (samples,), a value for each sample; None for a batch without a loss.
        state: knows the batch under way, and the device to add up on.
        weigh: returns the weight in the mean of the batch under way; its samples unless given.
        is_higher: whether higher is better; None where that isn't known.
    """

    total: Tensor
    weight: Tensor
    _update_count: int
    _computed: Tensor | None
    process_group: dist.ProcessGroup | None = None
    dist_sync_fn: Callable[..., list[Tensor]] | None = None

    def __init__(
        self,
        what: str,
        function: Callable[[Any, Any], Any],
        state: State,
        *,
        weigh: Callable[[], Number] | None = None,
        is_higher: bool | None,
    ) -> None:
        self._what = what
        self._function = function
        self._state = state
        self._weigh = weigh
        self.higher_is_better = is_higher
        self.device = state.device
        self.reset()

    @property
    def update_called(self) -> bool:
        """Whether a batch was added since the last reset."""
        return self._update_count > 0

    @property
    def metric_state(self) -> dict[str, Tensor]:
        """The sums, as a checkpoint has them."""
        return {"total": self.total, "weight": self.weight}

    def update(self, outputs: Any, targets: Any) -> None:
        """Adds the batch under way."""
        value = self._function(outputs, targets)
        if value is None and self._weigh:  # a model without a loss
            return
        if not isinstance(value, Tensor | float | int):
            raise TaskError(
                f"{self._what} returned {a(type(value).__name__)}, not a tensor",
                fix="return the mean over the batch, shape (), or a value for each sample",
            )
        value = torch.as_tensor(value).detach()
        samples = self._state.current_count().samples
        if value.shape not in ((), (samples,)):
            raise TaskError(
                f"{self._what} returned a tensor of shape {tuple(value.shape)}, which is neither one "
                f"number, (), nor one for each sample of the batch, ({samples},)",
                fix="return the mean over the batch, .mean(), or a value for each sample",
            )
        weight = self._weigh() if self._weigh else samples
        self._update_count += 1
        self.total = self.total + weighted(value.to(self.total.dtype).mean(), weight)
        self.weight = self.weight + weight
        self._computed = None

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Returns the mean, shape (); {} where no batch had the number.

        Collective where the ranks see different samples, at the first call after an update.
        """
        if self._computed is None:
            counted = torch.full_like(self.total, self._update_count)
            sums = torch.stack([self.total, self.weight, counted])
            if self.dist_sync_fn is not None:
                sums = torch.stack(self.dist_sync_fn(sums, self.process_group)).sum(0)
            if not self.update_called and not sums[2]:  # another rank may have had batches
                return {}
            self._computed = sums[0] / sums[1]
        return self._computed

    def reset(self) -> None:
        """Resets the mean."""
        zero = torch.zeros((), dtype=kind_of(self.device).sum_dtype, device=self.device)
        self.total = self.weight = zero
        self._update_count = 0
        self._computed = None

    def __deepcopy__(self, memo: Any) -> Self:
        """Returns a copy; its sums are its own, as they aren't changed in place."""
        return copy.copy(self)


class NamedMetric(NamedTuple):
    """A number of an eval set that a setting or a plugin follows.

    Attributes:
        name: as it is logged: test/accuracy.
        eval_set: the name of the eval data loader.
        metric: its name in the results of that set.
        is_higher: whether higher is better; None where that isn't known.
    """

    name: str
    eval_set: str
    metric: str
    is_higher: bool | None

    def value(self, results: Mapping[str, Mapping[str, Tensor]], what: str) -> float:
        """Returns the latest value; waits for the device.

        Args:
            results: by eval set and metric.
            what: the setting that names it, for messages.

        Raises:
            SettingError: there is none, or it is more than one number.
        """
        found = results.get(self.eval_set, {})
        if self.metric not in found:
            names = ", ".join(metric_name(self.eval_set, name) for name in found) or "nothing"
            raise SettingError(
                f"{what} names {self.name!r}, but the evaluation gave {names}",
                fix="name one of these",
            )
        if (value := found[self.metric]).numel() != 1:
            raise SettingError(
                f"{what} names {self.name!r}, which is a tensor of shape {tuple(value.shape)}, not "
                "one number",
                fix="name another metric, or let this one return its mean",
            )
        return float(value)


def named_metrics(metrics: Mapping[str, Mapping[str, Metric]]) -> dict[str, NamedMetric]:
    """Returns the metrics of the eval sets by the names of their numbers.

    Args:
        metrics: by data set, "train" or "eval/NAME": `state.metrics`.
    """
    named: dict[str, NamedMetric] = {}
    for dataset, metrics_of_set in metrics.items():
        if not dataset.startswith(EVAL):
            continue
        eval_set = dataset.removeprefix(EVAL)
        for metric_key, metric in metrics_of_set.items():
            name = metric_name(eval_set, metric_key)
            named[name] = NamedMetric(name, eval_set, metric_key, metric.higher_is_better)
    return named


def find_metric(what: str, wanted: str, state: State | StateView, *, also: str = "") -> NamedMetric:
    """Returns the number of an eval set that a person named, before the first evaluation.

    Args:
        what: the setting that names it, for messages.
        wanted: "test/accuracy", or "eval/test/accuracy"; "test/f1.micro" of a metric with several
            results; "min test/error" where the metric doesn't say what is better, which may also
            be a number that the task logs.
        state: whose metrics are built; those of test sets may not be followed.
        also: what else could have been named, for messages.

    Raises:
        SettingError: there is none of that name.
    """
    direction, _, name = wanted.strip().rpartition(" ")
    is_higher = {"min": False, "max": True}.get(direction)
    metrics = {
        key: one
        for key, one in state.metrics.items()
        if key.removeprefix(EVAL) not in state.test_sets
    }
    known = named_metrics(metrics)
    for one in (name, name.removeprefix(EVAL)):
        whole, _, part = one.rpartition(".")
        if (found := known.get(one)) is None and (of_whole := known.get(whole)) is not None:
            found = of_whole._replace(name=one, metric=f"{of_whole.metric}.{part}")
        if found is not None and not (direction and is_higher is None):
            return found if is_higher is None else found._replace(is_higher=is_higher)
    name = name.removeprefix(EVAL)
    of_sets = {key.removeprefix(EVAL): one for key, one in metrics.items() if key.startswith(EVAL)}
    for eval_set, of_set in of_sets.items():
        logged = name.removeprefix(f"{eval_set}/")
        if is_higher is not None and logged != name and not closest(logged, of_set):
            return NamedMetric(metric_name(eval_set, logged), eval_set, logged, is_higher)
    names = [*known, *([also] if also else [])]
    logged = f"min {name}" if name.partition("/")[0] in of_sets else "min test/kl"
    raise SettingError(
        f"{what}: no metric is named {wanted!r}{closest(name, names)}",
        fix=f"name one of {', '.join(names)}; of what the task logs while it evaluates, say which "
        f"is better, {logged!r}"
        if of_sets
        else "give Task(eval_dataloaders=...)",
    )


def followed(what: str, wanted: str, state: State | StateView) -> NamedMetric:
    """Returns what `find_metric` finds, with whether higher is better.

    Raises:
        SettingError: that isn't known, either.
    """
    found = find_metric(what, wanted, state)
    if found.is_higher is None:
        raise SettingError(
            f"{what}: the metric {found.name!r} doesn't say whether higher is better",
            fix=f'write "max {found.name}" or "min {found.name}"',
        )
    return found


def fresh_metrics(metrics: Any, state: State) -> dict[str, Metric | MeanOf | None]:
    """Creates metrics on the State's device, without updates yet.

    Args:
        metrics: a mapping by name, a `MetricCollection`, one metric (named after its class or
            function), or a factory of any of these. A metric is a `torchmetrics.Metric`, or a
            function of outputs and targets, averaged over the samples. `loss: None` is kept: the
            loss isn't measured.

    Raises:
        TaskError: an entry is neither.
    """
    if isinstance(metrics, list | tuple):
        raise TaskError(
            f"the task's metrics are {a(type(metrics).__name__)} of {len(metrics)}, without names",
            fix="name them: {'accuracy': MulticlassAccuracy(10)}",
        )
    named = (Mapping, nn.ModuleDict)  # a `MetricCollection`
    if not (isinstance(metrics, named) or is_metric(metrics)) and _takes(metrics):
        metrics = metrics()
    if not isinstance(metrics, named):
        kind = type(metrics).__name__.lower() if is_metric(metrics) else "metric"
        metrics = {getattr(metrics, "__name__", kind): metrics}
    parts = (
        (f"{name}.{part}".rstrip("."), one)
        for name, metric in metrics.items()
        for part, one in (metric.items() if isinstance(metric, nn.ModuleDict) else [("", metric)])
    )
    return {name: _fresh(name, one, state) for name, one in parts}


def _fresh(name: str, metric: Any, state: State) -> Metric | MeanOf | None:
    if metric is None and name == "loss":
        return None
    if is_metric(metric):
        fresh: Metric = copy.deepcopy(metric).to(state.device)
        fresh.reset()
        return fresh
    if callable(metric) and not isinstance(metric, type) and _takes(metric, None, None):
        is_higher = getattr(metric, "higher_is_better", None)
        what = f"metric {name!r}"
        return MeanOf(what, watched_once(metric, what), state, is_higher=is_higher)
    if isinstance(metric, type):
        raise TaskError(
            f"metric {name!r} is the class {metric.__name__}, not an instance of it",
            fix=f"write {metric.__name__}()",
        )
    raise TaskError(
        f"metric {name!r} is {a(type(metric).__name__)}, neither a torchmetrics.Metric nor a "
        "function of outputs and targets",
        fix="give Task(metrics={'accuracy': MulticlassAccuracy(10)}), or "
        "Task(metrics={'error': lambda outputs, targets: (outputs - targets).abs().mean()})",
    )


def _takes(function: Callable[..., Any], *args: None) -> bool:
    """Returns whether a function can be called with these many arguments, if that is known."""
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # written in C
        return True
    except TypeError:  # or it can't be called at all
        return False
    return True
