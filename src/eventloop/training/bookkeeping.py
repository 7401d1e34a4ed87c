"""The core's second plugin: what every run needs at its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from eventloop.errors import SettingError
from eventloop.hooks import hookimpl
from eventloop.signals import is_interruption
from eventloop.training.metrics import compute

if TYPE_CHECKING:
    from eventloop.clock import Time
    from eventloop.distributed.processes import Processes
    from eventloop.plugin.plans import Plans
    from eventloop.state import State
    from eventloop.training.numbers import Numbers


class LatestLoss:
    """The loss of the latest batch that had one, as this rank knows it.

    Attributes:
        value: shape (), detached; None before the first.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the loss."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.value = state["value"]


class Bookkeeping:
    """Does what every run needs at its events: evaluation when due, loss, metrics, learning rates.

    Args:
        plans: the plans of the run.
        processes: those that train together.
        numbers: what is logged.

    Attributes:
        history: see `Result`.
        latest_loss: see there.
    """

    __slots__ = ("_eval_interval", "_numbers", "_plans", "_processes", "history", "latest_loss")

    def __init__(self, plans: Plans, processes: Processes, numbers: Numbers) -> None:
        self._plans = plans
        self._numbers = numbers
        self._processes = processes
        self._eval_interval: Time | None = None
        self.history: list[dict[str, float]] = []
        self.latest_loss = LatestLoss()

    @hookimpl
    def after_load(self, state: State) -> None:
        settings = state.settings
        self._numbers.interval = _resolved("log_interval", settings.log_interval, state)
        if settings.eval_interval is not None:
            self._eval_interval = _resolved("eval_interval", settings.eval_interval, state)

    @hookimpl
    def should_eval(self, state: State) -> bool:
        interval = self._eval_interval
        if interval is None or not state.eval_dataloaders:
            return False
        clock = state.clock
        return clock.crossed(interval) or clock.reached(state.until)

    @hookimpl
    def should_stop(self, state: State) -> bool:
        return state.stop_reason is not None or state.clock.reached(state.until)

    @hookimpl
    def after_loss(self, state: State) -> None:
        metrics = state.metrics["train"]
        # An update of a plugin's may leave none: see `State.update`.
        if metrics and state.outputs is not None:
            self._plans.update_metrics(state, metrics)

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.loss is not None:
            self.latest_loss.value = state.loss
        self._numbers.record_batch(state.loss, state.optimizers)
        if state.metrics["train"] and state.clock.crossed(self._numbers.interval):
            log_train_metrics(state)

    @hookimpl
    def epoch_end(self, state: State) -> None:
        if state.clock.crossed(self._numbers.interval):
            log_train_metrics(state)

    @hookimpl
    def eval_end(self, state: State) -> None:
        assert state.eval_name is not None
        _log_scalars(state, f"eval/{state.eval_name}", state.eval_metrics[state.eval_name])

    @hookimpl
    def eval_after_all(self, state: State) -> None:
        self._add_row(state)

    @hookimpl
    def fit_end(self, state: State) -> None:
        if is_interruption(state.stop_reason):
            return  # the run goes on, here or in another process, as if nothing had been
        if not self.history or self.history[-1]["batch"] != state.clock.batch:
            self._add_row(state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the history."""
        return {"history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave."""
        self.history = list(state["history"])

    def _add_row(self, state: State) -> None:
        """Adds what is known now to the history; waits for the device, outside of any step."""
        row: dict[str, float] = state.clock.moment()._asdict()
        loss = self.latest_loss.value
        if loss is not None:
            losses = self._processes.all_gather(loss.item())
            row["train/loss"] = sum(losses) / len(losses)
        for dataset, results in state.eval_metrics.items():
            for name, value in results.items():
                if value.numel() == 1:
                    row[f"eval/{dataset}/{name}"] = value.item()
        self.history.append(row)


def log_train_metrics(state: State) -> None:
    """Logs the metrics of training since they were last logged, and empties them."""
    counted = {name: one for name, one in state.metrics["train"].items() if one.update_called}
    results = compute(counted)
    state.train_metrics |= results
    _log_scalars(state, "train", results)
    for metric in counted.values():
        metric.reset()


def _log_scalars(state: State, prefix: str, results: Mapping[str, Tensor]) -> None:
    for name, value in results.items():
        if value.numel() == 1:
            state.log(f"{prefix}/{name}", value)


def _resolved(name: str, interval: Time, state: State) -> Time:
    try:
        return state.resolve(interval)
    except ValueError as error:
        raise SettingError(f"{name}: {error}", fix=f"write {name} in batches: 100ba") from None
