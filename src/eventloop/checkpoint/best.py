"""The best evaluation so far: its checkpoint, and the evaluation of test sets with its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from torch import Tensor

from eventloop.checkpoint.capture import restore_model
from eventloop.checkpoint.checkpoint_export import weights_and_states
from eventloop.forms import FLOAT, NonNegativeInt, as_dict, from_dict, meets
from eventloop.training.metrics import NamedMetric, scalars_of

if TYPE_CHECKING:
    from pathlib import Path

    from eventloop.checkpoint.saver import Saver
    from eventloop.checkpoint.states import PluginStates
    from eventloop.plugin.plans import ActivePlugins
    from eventloop.state import State
    from eventloop.urls import Place

SETTING = "checkpoint_best"


_NO_NAN = meets(lambda value: not math.isnan(value), FLOAT, "a number")


@dataclass(frozen=True)
class BestState:
    """The best evaluation in a checkpoint.

    Attributes:
        metric: the direction and name of the metric: "max test/accuracy".
        value: the best value, negated for "min", so that larger is better.
        batch: the batch count of the evaluation; None before the first.
    """

    metric: str
    value: Annotated[float, _NO_NAN]
    batch: NonNegativeInt | None


class Best:
    """Tracks a metric of an eval set.

    Args:
        metric: the metric to track, with a known direction.

    Attributes:
        eval_set: the name of the eval set.
        batch: the batch count of the best evaluation; None before the first.
    """

    def __init__(self, metric: NamedMetric) -> None:
        self._followed = metric
        self.eval_set = metric.eval_set
        self._name = f"{'max' if metric.is_higher else 'min'} {metric.name}"
        self._sign = 1.0 if metric.is_higher else -1.0
        self._value = -math.inf
        self.batch: int | None = None
        self._before: tuple[float, int | None] = (-math.inf, None)

    def improves(self, results: Mapping[str, Mapping[str, Tensor]], batch: int) -> bool:
        """Records an evaluation; returns whether it is the best so far.

        Args:
            results: by data loader and metric; reading them waits for the device.
            batch: the batch count of the evaluation.

        Raises:
            SettingError: the results lack the metric.
        """
        value = self._sign * self._followed.value(results, SETTING)
        if not value > self._value:  # a NaN is never the best
            return False
        self._before = (self._value, self.batch)
        self._value = value
        self.batch = batch
        return True

    def batch_without(self, batch: int) -> int | None:
        """Returns the batch count of the best evaluation, ignoring the evaluation of a batch."""
        return self._before[1] if self.batch == batch else self.batch

    def withdraw(self, batch: int) -> None:
        """Reverts to the previous best if the best is of this batch, whose weights aren't finite."""
        if self.batch == batch:
            self._value, self.batch = self._before

    def state_dict(self) -> dict[str, Any]:
        """Returns a `BestState`."""
        return as_dict(BestState(self._name, self._value, self.batch))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `BestState`, unless it belongs to another metric."""
        if state.get("metric") == self._name:
            saved = from_dict(BestState, state)
            self._value = saved.value
            self.batch = saved.batch


class BestWeights:
    """Temporarily loads the weights of the best evaluation into the model.

    Args:
        active: the active plugins of the run.
        states: the states of plugins.
        saver: knows the best checkpoint.
        local: returns a checkpoint's folder on this machine.

    Attributes:
        lent: the checkpoint whose weights the test sets used; None for the last weights.
    """

    def __init__(
        self,
        active: ActivePlugins,
        states: PluginStates,
        saver: Saver,
        local: Callable[[Place], Path],
    ) -> None:
        self._active = active
        self._states = states
        self._saver = saver
        self._local = local
        self.lent: Place | None = None

    @contextmanager
    def __call__(self, state: State) -> Iterator[None]:
        """Loads the best weights, with the states of exporting plugins, for a `with` block.

        Collective: every rank must call it. Without a best checkpoint, the model doesn't change.
        """
        self.lent = place = self._saver.best_place(state)
        with self._loaded(state, place):
            yield
            name = None if place is None else place.name
            state.manifest = {**state.manifest, "tested": _tested(state, name)}

    @contextmanager
    def to_export(self, state: State) -> Iterator[Place | None]:
        """Loads the best weights in the same way, and yields their checkpoint, or None without one."""
        place = self._saver.best_place(state)
        with self._loaded(state, place):
            yield place

    @contextmanager
    def _loaded(self, state: State, place: Place | None) -> Iterator[None]:
        if place is None:
            yield
            return
        hooks = self._active.plans
        names = self._active.assembly.exporting
        weights, states, left_out = weights_and_states(self._local(place), names)
        # In a sharded run, only this rank's shards.
        current_weights = copy.deepcopy(dict(state.model.state_dict()))
        current_states = self._states.take(per_rank=False).items()
        exporting_states = copy.deepcopy(
            {name: plugin_state for name, plugin_state in current_states if name in names}
        )
        try:
            self._states.put(states)
            restore_model(state, hooks, weights, left_out)
            yield
        finally:
            self._states.put(exporting_states)
            hooks.restore_model(state, current_weights, True)


def _tested(state: State, checkpoint: str | None) -> dict[str, Any]:
    """Returns the test results in JSON values.

    Args:
        checkpoint: the name of the checkpoint whose weights were used; None for the last weights.
    """
    numbers = scalars_of(state.eval_metrics, only=state.eval_sets)
    metrics = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
    return {"checkpoint": checkpoint, "batch": state.clock.batch, "metrics": metrics}
