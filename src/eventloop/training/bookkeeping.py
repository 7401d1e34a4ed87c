"""The core's second plugin: evaluation when due, losses, metrics and the history of the run."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eventloop.errors import SettingError, TaskError
from eventloop.forms import as_dict, from_dict
from eventloop.hook_markers import hookimpl
from eventloop.signals import is_interruption
from eventloop.training.evaluation import is_due
from eventloop.training.metrics import (
    EVAL,
    MeanOf,
    log_train_metrics,
    loss_in,
    metric_name,
    scalars_of,
)
from eventloop.training.running_means import AT_ONCE, EpochLoss

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State
    from eventloop.training.logged_numbers import Numbers


LOSS = "loss"


@dataclass(frozen=True)
class BookkeepingState:
    """Bookkeeping in a checkpoint: a row of numbers for each evaluation and epoch."""

    history: list[dict[str, float]]


class Bookkeeping:
    """Runs evaluations when due, and records losses, metrics, learning rates and the history.

    Args:
        active: the plugins of the run, and their plans.
        processes: the processes that train together.
        numbers: the logged numbers.
        device: the device of the losses.

    Attributes:
        history: see `Result`.
        loss: the mean loss of the current epoch.
    """

    __slots__ = (
        "_active",
        "_eval_interval",
        "_in_fit",
        "_numbers",
        "_processes",
        "history",
        "loss",
    )

    def __init__(
        self, active: ActivePlugins, processes: Processes, numbers: Numbers, device: torch.device
    ) -> None:
        self._active = active
        self._numbers = numbers
        self._processes = processes
        self._eval_interval: Time | None = None
        self._in_fit = False
        self.history: list[dict[str, float]] = []
        self.loss = EpochLoss(device)

    @hookimpl
    def after_load(self, state: State) -> None:
        settings = state.settings
        self._numbers.interval = resolved("log_interval", settings.log_interval, state)
        if settings.eval_interval is not None:
            self._eval_interval = resolved("eval_interval", settings.eval_interval, state)

    # Innermost, so that the wrapper that synchronizes metrics over ranks also gets the mean loss.
    @hookimpl(wrapper=True, trylast=True)
    def build_metrics(self, state: State, dataset: str) -> Generator[None, Any, Any]:
        metrics = yield
        enabled = {name: metric for name, metric in metrics.items() if metric is not None}
        if dataset != "train" and LOSS not in metrics:
            enabled[LOSS] = self._mean_loss(state)
        return enabled

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._in_fit = True

    @hookimpl
    def epoch_start(self, state: State) -> None:
        if not state.resumed:
            self.loss.start_epoch()

    @hookimpl
    def should_eval(self, state: State) -> bool:
        has_sets = bool(state.eval_sets) or self._active.evaluates
        return has_sets and is_due(self._eval_interval, state)

    @hookimpl
    def should_stop(self, state: State) -> bool:
        return state.stop_reason is not None or state.clock.reached(state.until)

    @hookimpl
    def after_loss(self, state: State) -> None:
        metrics = state.metrics["train"]
        # An update of a plugin may leave no outputs, see `State.update`. A batch that only keeps this
        # rank in step with the others has no samples.
        if metrics and state.outputs is not None and state.count.samples:
            self._active.plans.update_metrics(state, metrics)

    @hookimpl
    def batch_end(self, state: State) -> None:
        loss = self.loss
        counts = state.clock._now
        if state.loss is not None:
            loss.latest = state.loss
            loss.each.append((counts[2] - state.clock._previous[2], state.loss))
            if not counts[1] % AT_ONCE:
                loss.fold()
        self._numbers.record_batch(state.loss, state.optimizers)
        if state.metrics["train"] and state.clock.crossed(self._numbers.interval):
            log_train_metrics(state)

    @hookimpl
    def epoch_end(self, state: State) -> None:
        self._update_mean_loss(state)
        if state.clock.crossed(self._numbers.interval):
            log_train_metrics(state)

    @hookimpl
    def eval_before_all(self, state: State) -> None:
        self._numbers.of_set.forget()
        self._update_mean_loss(state)

    @hookimpl
    def eval_end(self, state: State) -> None:
        name = state.eval_name
        assert name is not None
        results = state.eval_metrics[name]
        # Numbers that plugins log at this event; those logged for batches are in the results already.
        logged_at_end = self._numbers.of_set.take(self._processes, state.device)
        results |= {name: value for name, value in logged_at_end.items() if name not in results}
        if not results and LOSS in state.metrics[f"{EVAL}{name}"] and not self._active.evaluates:
            raise TaskError(
                f"the evaluation of {name!r} gave no number: the task has neither loss nor metrics, "
                "and the model's outputs have no .loss",
                fix="set Task(loss=...) or Task(metrics=...); Task(metrics={}) evaluates without results",
            )
        for metric, value in results.items():
            if value.numel() == 1:
                self._numbers.record(metric_name(name, metric), value)

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        self._add_row(state)

    @hookimpl
    def exception(self) -> None:
        self._in_fit = False

    @hookimpl
    def fit_end(self, state: State) -> None:
        self._in_fit = False
        if is_interruption(state.stop_reason):
            # A run that was interrupted must continue with the same numbers as one that wasn't.
            return
        if not self.history or self.history[-1]["batch"] != state.clock.batch:
            self._update_mean_loss(state)
            self._add_row(state)

    def state_dict(self) -> dict[str, Any]:
        return as_dict(BookkeepingState(self.history))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history = list(from_dict(BookkeepingState, state).history)

    def _add_row(self, state: State) -> None:
        """Adds a row with the current numbers to the history; waits for the device, but in no step."""
        row: dict[str, float] = state.clock.moment()._asdict()
        if self._in_fit:
            log_train_metrics(state)
        for name, value in state.train_metrics.items():
            if value.numel() == 1:
                row[f"train/{name}"] = value.item()
        row |= scalars_of(state.eval_metrics)
        self.history.append(row)

    def _mean_loss(self, state: State) -> MeanOf:
        is_core = state.owner("loss") == "core"
        unwrapped: Callable[[State], Tensor] = self._active.unwrapped("loss", state)

        def loss(_outputs: Any, _targets: Any) -> Tensor | None:
            return loss_in(state.outputs) if is_core else unwrapped(state)

        return MeanOf("the loss", loss, state, weigh=state.current_weight, is_higher=False)

    def _update_mean_loss(self, state: State) -> None:
        """Sets `train_metrics["loss"]` to the mean loss over the samples of the epoch so far."""
        if LOSS in state.metrics["train"]:
            return  # the task has a metric of that name
        mean = self.loss.mean(self._processes)
        if mean is None:
            state.train_metrics.pop(LOSS, None)
        else:
            state.train_metrics[LOSS] = mean


def resolved(name: str, interval: Time, state: State) -> Time:
    """Returns an interval in a unit that the clock counts: see `State.resolve`.

    Args:
        name: the name of the setting, for messages.

    Raises:
        SettingError: the interval is a fraction of an epoch or a run of unknown length.
    """
    try:
        return state.resolve(interval)
    except ValueError as error:
        raise SettingError(f"{name}: {error}", fix=f"write {name} in batches: 100ba") from None
