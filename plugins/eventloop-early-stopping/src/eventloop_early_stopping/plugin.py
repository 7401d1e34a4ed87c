"""The plugin: which values are checked, when, and how it stops the run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from eventloop import SettingError, Time, hookimpl
from eventloop.toolbox import NamedMetric, as_option
from eventloop_early_stopping.patience import Waiting
from eventloop_early_stopping.watched_metric import OPTION, watched_by

if TYPE_CHECKING:
    from eventloop import StateView

_MODES = ("auto", "min", "max")
_ON_NAN = ("wait", "stop")


class EarlyStopping:
    """Stops the run when a metric has stopped improving.

    Args:
        metric: metric to watch, by its name in the log: SET/METRIC, or train/loss, the mean over the
            samples of an epoch. Not set: the first eval metric that defines whether higher is better,
            or else train/loss.
        mode: whether lower (min) or higher (max) is better; auto: as the metric defines it.
        patience: time since the best value after which a worse value ends the run: 3ep, 500ba, 0.1dur.
        min_delta: difference by which a value has to be better to count as an improvement.
        on_nan: whether a NaN counts as no improvement (wait), or ends the run (stop).

    Raises:
        TypeError: `min_delta` is not a number.
        ValueError: an option has an invalid value, or no effect without another option.
    """

    needs_eval_data = True
    stops_runs = True

    def __init__(
        self,
        *,
        metric: str | None = None,
        mode: Literal["auto", "min", "max"] = "auto",
        patience: str | Time = "5ep",
        min_delta: float = 0.0,
        on_nan: Literal["wait", "stop"] = "wait",
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode={mode!r} is none of {', '.join(_MODES)}")
        if mode != "auto" and metric is None:
            raise ValueError(f"mode={mode!r} says nothing without metric; name one to watch")
        if on_nan not in _ON_NAN:
            raise ValueError(f"on_nan={on_nan!r} is none of {', '.join(_ON_NAN)}")
        if not isinstance(min_delta, int | float):
            raise TypeError(f"min_delta={min_delta!r} is not a number")
        if not (min_delta >= 0 and math.isfinite(min_delta)):
            raise ValueError(f"min_delta={min_delta!r} isn't 0 or a positive number")
        self.metric = metric
        self.mode = mode
        self.patience = Time(patience)
        self.min_delta = min_delta
        self.on_nan = on_nan
        self._watched: NamedMetric | None = None
        self._waiting: Waiting | None = None
        self._until = ""
        self._in_fit = False
        self._loaded: Mapping[str, Any] | None = None

    @hookimpl
    def after_load(self, state: StateView) -> None:
        """Chooses the metric, now that all are built, and restores the waiting of a resumed run."""
        evaluates = state.settings.eval_interval is not None
        self._watched = watched_by(self.metric, state, mode=self.mode, evaluates=evaluates)
        self._waiting = Waiting(
            self._watched.name,
            is_higher=self._is_higher(self._watched),
            patience=self._resolved(state),
            min_delta=self.min_delta,
            stops_at_nan=self.on_nan == "stop",
        )
        loaded = self._loaded
        self._loaded = None
        if loaded is not None and loaded["watched"] == self._described():
            self._waiting.load_state_dict(loaded["waiting"])
            self._until = loaded["until"]

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        """Starts waiting, again if a run that was stopped here gets a longer duration."""
        assert self._waiting is not None
        self._in_fit = True
        is_prolonged = self._waiting.reason is not None and self._until != str(state.until)
        if self._waiting.since is None or is_prolonged:
            self._waiting.begin(state.clock.moment(), state.clock.epoch_number)
        self._until = str(state.until)
        self._say_why(state)
        assert self._watched is not None
        if self._watched.eval_set and state.settings.eval_interval is None and not state.rank:
            warnings.warn(
                f"early-stopping watches {self._watched.name!r}, but with eval_interval none "
                "nothing is evaluated, unless a plugin asks for it",
                stacklevel=2,
            )

    @hookimpl
    def batch_end(self, state: StateView) -> None:
        """Refuses a patience that would never end.

        Raises:
            SettingError: the patience is in tokens, but there are none.
        """
        if self.patience.unit == "tok" and not state.clock.token:
            raise SettingError(
                f"early-stopping.patience is {self.patience}, but tokens aren't counted",
                fix="give Task(num_tokens=lambda inputs: inputs.numel()), say, or write it in "
                "batches: " + as_option("early-stopping", patience="100ba"),
            )

    @hookimpl
    def epoch_checkpoint(self, state: StateView) -> None:
        """Compares the mean loss of a complete epoch."""
        assert self._watched is not None
        loss = state.train_metrics.get("loss")
        if not self._watched.eval_set and not state.clock.batch_in_epoch and loss is not None:
            self._take(state, float(loss))

    @hookimpl
    def eval_after_all(self, state: StateView) -> None:
        """Compares the result of an evaluation, unless it is outside of a fit."""
        assert self._watched is not None
        if self._in_fit and self._watched.eval_set in state.eval_sets:
            # Rank 0's value, in case ranks differ in rounding: all must stop at the same batch.
            value, *_ = state.all_gather(self._watched.value(state.eval_metrics, OPTION))
            self._take(state, value)

    @hookimpl
    def should_stop(self, state: StateView) -> bool:
        """Whether the patience has run out."""
        assert self._waiting is not None
        return self._waiting.reason is not None

    @hookimpl
    def fit_end(self, state: StateView) -> None:
        """Ignores later evaluations, outside of the fit."""
        self._in_fit = False

    @hookimpl
    def exception(self) -> None:
        """Ignores later evaluations, outside of the fit."""
        self._in_fit = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value and its time, with the name of the metric."""
        assert self._waiting is not None
        waiting = self._waiting.state_dict()
        return {"watched": self._described(), "waiting": waiting, "until": self._until}

    def load_state_dict(self, state: Mapping[str, Any], version: str) -> None:
        """Stores the state until the metric is chosen; the state of another metric is discarded."""
        self._loaded = state

    def _take(self, state: StateView, value: float) -> None:
        assert self._waiting is not None
        self._waiting.take(value, state.clock.moment(), state.clock.epoch_number)
        if self._waiting.best is not None:
            state.log("early-stopping/best", self._waiting.best)
        self._say_why(state)

    def _say_why(self, state: StateView) -> None:
        assert self._waiting is not None
        if self._waiting.reason is not None:
            state.request_stop(f"early-stopping: {self._waiting.reason}")

    def _described(self) -> str:
        assert self._watched is not None
        return f"{'max' if self._is_higher(self._watched) else 'min'} {self._watched.name}"

    def _is_higher(self, watched: NamedMetric) -> bool:
        if self.mode != "auto":
            return self.mode == "max"
        if watched.is_higher is None:
            raise SettingError(
                f"early-stopping: the metric {watched.name!r} doesn't say whether higher is better",
                fix="say it: " + as_option("early-stopping", mode="max") + ", or min",
            )
        return watched.is_higher

    def _resolved(self, state: StateView) -> Time:
        try:
            return state.resolve(self.patience)
        except ValueError as error:
            raise SettingError(
                f"early-stopping.patience: {error}",
                fix="write it in batches: " + as_option("early-stopping", patience="100ba"),
            ) from None
