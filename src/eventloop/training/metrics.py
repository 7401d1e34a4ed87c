"""Metrics: a copy for each data set, functions used as metrics, and how results are named."""

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
_TRAINING_PREFIXES = ("train", "lr")


def is_metric(value: Any) -> bool:
    """Whether a value is a `torchmetrics.Metric` or has the same interface.

    Doesn't import torchmetrics, which takes longer to import than torch.
    """
    return not isinstance(value, type) and hasattr(value, "metric_state")


def metric_parts(metrics: Mapping[str, Metric]) -> Iterator[tuple[str, Metric]]:
    """Yields the metrics and the metrics that they contain, with their names."""
    for name, metric in metrics.items():
        contained = metric.named_modules() if isinstance(metric, nn.Module) else [("", metric)]
        for path, module in contained:
            if is_metric(module):
                yield f"{name}.{path}".rstrip("."), module


def predictions(outputs: Any) -> Any:
    """Returns what metrics receive: `outputs.logits` where it exists, else the outputs."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def loss_in(outputs: Any) -> Any:
    """Returns the loss that a model computed: `outputs.loss` or `outputs["loss"]`, else None."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return getattr(outputs, "loss", None)


def compute(metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
    """Computes metrics; returns a tensor for each, on the metric's device.

    The results of a metric that returns a mapping are named "metric.key".

    Raises:
        TaskError: a result isn't a tensor.
    """
    results: dict[str, Tensor] = {}
    for name, metric in metrics.items():
        if isinstance(value := metric.compute(), Mapping):
            results |= {f"{name}.{key}": result for key, result in value.items()}
        else:
            results[name] = value
    for name, value in results.items():
        if not isinstance(value, Tensor):
            raise TaskError(f"metric {name!r} gave a {type(value).__name__}, not a tensor")
    return results


def log_train_metrics(state: State) -> None:
    """Logs the training metrics over the batches since they were last logged; resets them."""
    if state.world_size > 1 and not state.even_batches:
        _prepare_for_collectives(state)
    updated_metrics = {
        name: metric for name, metric in state.metrics["train"].items() if metric.update_called
    }
    results = compute(updated_metrics)
    state.train_metrics |= results
    for name, value in results.items():
        if value.numel() == 1:
            state.log(f"train/{name}", value)
    for metric in updated_metrics.values():
        metric.reset()


def _prepare_for_collectives(state: State) -> None:
    """Lets `compute` run on this rank for metrics that only other ranks have updated.

    `compute` is collective: if this rank skipped a metric, the ranks that updated it would hang.
    """
    metrics = dict(metric_parts(state.metrics["train"]))
    local_lists = {
        name: _lists_of(metric) for name, metric in metrics.items() if metric.update_called
    }
    lists_of_ranks: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
    for lists in state.all_gather(local_lists):
        lists_of_ranks |= lists
    for name in lists_of_ranks.keys() - local_lists.keys():
        metric = metrics[name]
        # Private: without it, torchmetrics warns that compute was called before update (1.9).
        metric._update_count = 1
        for field, (dtype, shape) in lists_of_ranks[name].items():
            setattr(metric, field, [torch.empty(0, *shape, dtype=dtype, device=metric.device)])


def _lists_of(metric: Metric) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns dtype and shape, without the first dimension, of each list of tensors in the state."""
    lists = {}
    for field, value in metric.metric_state.items():
        if isinstance(value, list) and value:
            lists[field] = (value[0].dtype, tuple(value[0].shape[1:]))
    return lists


def metric_name(eval_set: str, metric: str) -> str:
    """Returns the name under which a number of an eval set is logged: test/accuracy.

    An eval set named like a prefix of training's numbers, "train" or "lr", gets the prefix "eval/":
    eval/train/accuracy.
    """
    name = f"{eval_set}/{metric}"
    return f"{EVAL}{name}" if eval_set in _TRAINING_PREFIXES else name


def scalars_of(
    results: Mapping[str, Mapping[str, Tensor]], only: Collection[str] | None = None
) -> dict[str, float]:
    """Returns the scalars among the results of eval sets, by logged name; waits for the device.

    Args:
        results: by eval set and metric.
        only: the eval sets to include; None for all.
    """
    scalars = {}
    for eval_set, values in results.items():
        if only is not None and eval_set not in only:
            continue
        for name, value in values.items():
            if not isinstance(value, Tensor):
                scalars[metric_name(eval_set, name)] = value
            elif value.numel() == 1:
                scalars[metric_name(eval_set, name)] = value.item()
    return scalars


class MeanOf:
    """The mean of a function over the samples of all batches, summed in float64 on the device.

    Has the methods of `torchmetrics.Metric` that the core uses, without importing torchmetrics, which
    takes longer than importing torch.

    Args:
        subject: the name in messages: "metric 'error'".
        function: takes outputs and targets; returns the mean over the batch, shape (), or a value
            for each sample, shape (samples,); None for a batch without a loss.
        state: provides the current batch, and the device of the sums.
        weigh: returns the weight of the current batch in the mean; by default its number of samples.
        is_higher: whether higher is better; None if unknown.
    """

    total: Tensor
    weight: Tensor
    _update_count: int
    _computed: Tensor | None
    process_group: dist.ProcessGroup | None = None
    dist_sync_fn: Callable[..., list[Tensor]] | None = None

    def __init__(
        self,
        subject: str,
        function: Callable[[Any, Any], Any],
        state: State,
        *,
        weigh: Callable[[], Number] | None = None,
        is_higher: bool | None,
    ) -> None:
        self._subject = subject
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
        """The sums, for checkpoints."""
        return {"total": self.total, "weight": self.weight}

    def update(self, outputs: Any, targets: Any) -> None:
        """Adds the value of the current batch."""
        value = self._function(outputs, targets)
        if value is None and self._weigh:  # the loss of a model that computes none
            return
        if not isinstance(value, Tensor | float | int):
            raise TaskError(
                f"{self._subject} returned {a(type(value).__name__)}, not a tensor",
                fix="return the mean over the batch, shape (), or a value for each sample",
            )
        value = torch.as_tensor(value).detach()
        samples = self._state.current_count().samples
        if value.shape not in ((), (samples,)):
            raise TaskError(
                f"{self._subject} returned a tensor of shape {tuple(value.shape)}; expected () or "
                f"({samples},), a value for each sample of the batch",
                fix="return the mean over the batch, .mean(), or a value for each sample",
            )
        weight = self._weigh() if self._weigh else samples
        self._update_count += 1
        self.total = self.total + weighted(value.to(self.total.dtype).mean(), weight)
        self.weight = self.weight + weight
        self._computed = None

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Returns the mean, shape (); {} if no batch had a value.

        With `dist_sync_fn`, the first call after an update is collective.
        """
        if self._computed is None:
            counted = torch.full_like(self.total, self._update_count)
            sums = torch.stack([self.total, self.weight, counted])
            if self.dist_sync_fn is not None:
                sums = torch.stack(self.dist_sync_fn(sums, self.process_group)).sum(0)
            # `sums[2]` counts the updates of all ranks. Reading it waits for the device, so a rank
            # that has updates itself doesn't.
            if not self.update_called and not sums[2]:
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
        """Returns a shallow copy, which is independent because sums are replaced, not changed in place."""
        return copy.copy(self)


class NamedMetric(NamedTuple):
    """A number of an eval set that a setting or a plugin refers to.

    Attributes:
        name: the name under which it is logged: test/accuracy.
        eval_set: the name of the eval data loader.
        metric: its name in the results of this eval set.
        is_higher: whether higher is better; None if unknown.
    """

    name: str
    eval_set: str
    metric: str
    is_higher: bool | None

    def value(self, results: Mapping[str, Mapping[str, Tensor]], what: str) -> float:
        """Returns the latest value; waits for the device.

        Args:
            results: by eval set and metric.
            what: the setting that names the metric, for messages.

        Raises:
            SettingError: the results don't contain the metric, or it isn't a scalar.
        """
        results_of_set = results.get(self.eval_set, {})
        if self.metric not in results_of_set:
            names = [metric_name(self.eval_set, name) for name in results_of_set]
            raise SettingError(
                f"{what} names {self.name!r}, but the evaluation gave "
                f"{', '.join(names) or 'nothing'}",
                fix="name one of these",
            )
        value = results_of_set[self.metric]
        if value.numel() != 1:
            raise SettingError(
                f"{what} names {self.name!r}, which is a tensor of shape {tuple(value.shape)}, not "
                "one number",
                fix="name another metric, or let this metric return its mean",
            )
        return float(value)


def named_metrics(metrics: Mapping[str, Mapping[str, Metric]]) -> dict[str, NamedMetric]:
    """Returns the metrics of all eval sets, by the names under which they are logged.

    Args:
        metrics: `state.metrics`, by data set: "train" or "eval/NAME".
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
    """Returns the metric that a user has named, before the first evaluation.

    Args:
        what: the setting that names the metric, for messages.
        wanted: "test/accuracy" or "eval/test/accuracy"; "test/f1.micro" for one result of a metric
            that returns several; "min test/error" if the metric doesn't say whether higher is
            better. With a direction, it may also be a number that the task logs.
        state: provides the metrics; those of test sets are excluded.
        also: another valid name, for messages.

    Raises:
        SettingError: no metric has this name.
    """
    direction, _, name = wanted.strip().rpartition(" ")
    is_higher = {"min": False, "max": True}.get(direction)
    metrics = {
        dataset: metrics_of_set
        for dataset, metrics_of_set in state.metrics.items()
        if dataset.removeprefix(EVAL) not in state.test_sets
    }
    metrics_by_name = named_metrics(metrics)
    # A metric of an eval set named "train" is itself named "eval/train/...", so try the prefix first.
    for candidate in (name, name.removeprefix(EVAL)):
        metric = metrics_by_name.get(candidate)
        if metric is None:
            parent_name, _, result_key = candidate.rpartition(".")
            parent = metrics_by_name.get(parent_name)
            if parent is not None:
                metric = parent._replace(name=candidate, metric=f"{parent.metric}.{result_key}")
        is_direction_valid = not direction or is_higher is not None
        if metric is not None and is_direction_valid:
            return metric if is_higher is None else metric._replace(is_higher=is_higher)
    name = name.removeprefix(EVAL)
    eval_sets = {
        dataset.removeprefix(EVAL): metrics_of_set
        for dataset, metrics_of_set in metrics.items()
        if dataset.startswith(EVAL)
    }
    for eval_set, metrics_of_set in eval_sets.items():
        logged_name = name.removeprefix(f"{eval_set}/")
        # A name close to a metric's is more likely misspelled than logged by the task.
        is_logged = logged_name != name and not closest(logged_name, metrics_of_set)
        if is_higher is not None and is_logged:
            return NamedMetric(metric_name(eval_set, logged_name), eval_set, logged_name, is_higher)
    raise _unknown_metric(
        what, wanted, name, [*metrics_by_name, *([also] if also else [])], eval_sets
    )


def _unknown_metric(
    setting: str, text: str, name: str, valid_names: list[str], eval_sets: Collection[str]
) -> SettingError:
    """Returns the error for a metric that doesn't exist.

    Args:
        setting: the setting that names it.
        text: the value of the setting, with a direction.
        name: the metric's name in it.
    """
    fix = "set eval data: Task(eval_dataloaders=...)"
    if eval_sets:
        is_of_eval_set = name.partition("/")[0] in eval_sets
        example = f"min {name}" if is_of_eval_set else "min test/kl"
        fix = (
            f"use {' or '.join(valid_names)}. For a value logged during evaluation, give the "
            f"direction: {example!r}"
        )
    return SettingError(
        f"{setting}: no metric is named {text!r}{closest(name, valid_names)}", fix=fix
    )


def followed(setting: str, text: str, state: State | StateView) -> NamedMetric:
    """Returns the result of `find_metric`, with a known `is_higher`.

    Args:
        setting: the setting that names the metric, for messages.
        text: the value of the setting: see `find_metric`.

    Raises:
        SettingError: no metric has this name, or it isn't known whether higher is better.
    """
    metric = find_metric(setting, text, state)
    if metric.is_higher is None:
        raise SettingError(
            f"{setting}: the metric {metric.name!r} doesn't say whether higher is better",
            fix=f'write "max {metric.name}" or "min {metric.name}"',
        )
    return metric


def fresh_metrics(metrics: Any, state: State) -> dict[str, Metric | MeanOf | None]:
    """Creates a fresh copy of each metric, on the State's device.

    Args:
        metrics: a mapping by name, a `MetricCollection`, a single metric (named after its class or
            function), or a factory that returns any of these. A metric is a `torchmetrics.Metric`,
            or a function of outputs and targets, averaged over the samples. An entry `loss: None`
            is kept: it switches the mean loss off.

    Raises:
        TaskError: an entry is neither a metric nor a function.
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
    fresh: dict[str, Metric | MeanOf | None] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            for key, contained in metric.items():
                fresh[f"{name}.{key}"] = _fresh(f"{name}.{key}", contained, state)
        else:
            fresh[name] = _fresh(name, metric, state)
    return fresh


def _fresh(name: str, metric: Any, state: State) -> Metric | MeanOf | None:
    if metric is None and name == "loss":
        return None
    if is_metric(metric):
        fresh: Metric = copy.deepcopy(metric).to(state.device)
        fresh.reset()
        return fresh
    if callable(metric) and not isinstance(metric, type) and _takes(metric, None, None):
        is_higher = getattr(metric, "higher_is_better", None)
        subject = f"metric {name!r}"
        return MeanOf(subject, watched_once(metric, subject), state, is_higher=is_higher)
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
    """Returns whether a function accepts this number of positional arguments; True if unknown."""
    try:
        inspect.signature(function).bind(*args)
    except ValueError:  # functions written in C have no signature
        return True
    except TypeError:
        return False
    return True
