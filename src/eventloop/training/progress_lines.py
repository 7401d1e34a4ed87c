"""The progress of a run as lines of text: for progress plugins, and for runs without such a plugin."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from eventloop.hook_markers import hookimpl
from eventloop.safe_text import one_line
from eventloop.training.metrics import metric_name

if TYPE_CHECKING:
    from eventloop.clock import Clock, Moment, Time
    from eventloop.view import StateView

_MAX_NAME_LENGTH = 100
Results = Mapping[str, Mapping[str, float]]


class ProgressLines:
    """Prints a line for each epoch, each evaluation in an epoch, and at least at an interval.

    `eventloop fit` uses it if no plugin declares `shows_progress = True`; in Python, pass it:
    `Trainer(task, callbacks=[ProgressLines()])`.

    Args:
        interval_s: the longest time without a line, in seconds.
        write: called with each line; by default `print`.
    """

    shows_progress = True
    needs_eval_data = True

    def __init__(
        self, *, interval_s: float = 60.0, write: Callable[[str], object] | None = None
    ) -> None:
        self._interval_s = interval_s
        self._write_line = write or print
        self._epoch: EpochLine | None = None
        self._loss: float | None = None
        self._due_at = math.inf

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        now = time.perf_counter()
        self._epoch = EpochLine(state.clock, state.until, now, state.num_batches)
        self._due_at = now + self._interval_s

    @hookimpl(rank_zero=True)
    def epoch_start(self, state: StateView) -> None:
        if self._epoch is not None:
            self._epoch.start(time.perf_counter(), state.num_batches)

    @hookimpl(rank_zero=True)
    def batch_end(self) -> None:
        """Writes a line if it is due; most steps cost only this comparison."""
        now = time.perf_counter()
        if now >= self._due_at and self._epoch is not None:
            self._write(self._epoch.text(now, self._loss))

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Records the loss from the numbers that have arrived on the host."""
        self._loss = numbers.get("train/loss", self._loss)

    @hookimpl(rank_zero=True)
    def eval_before_all(self) -> None:
        if self._epoch is not None:
            self._epoch.pause(time.perf_counter())

    @hookimpl(rank_zero=True)
    def eval_after_all(self, state: StateView) -> None:
        """Writes the results, unless the line at the end of the epoch will."""
        if self._epoch is not None:
            now = time.perf_counter()
            self._epoch.resume(now)
            self._epoch.results = scalars(
                {eval_set: state.eval_metrics[eval_set] for eval_set in state.eval_sets}
            )
            if self._epoch.results and self._epoch.is_under_way:
                self._write(self._epoch.text(now, mean_loss(state), with_results=True))

    @hookimpl(rank_zero=True)
    def epoch_end(self) -> None:
        if self._epoch is not None:
            self._epoch.end()

    @hookimpl(rank_zero=True)
    def epoch_checkpoint(self, state: StateView) -> None:
        """Writes the line of the epoch, after the evaluation at its end."""
        if self._epoch is not None:
            now = time.perf_counter()
            self._write(self._epoch.text(now, mean_loss(state), with_results=True))

    @hookimpl(rank_zero=True)
    def fit_end(self) -> None:
        self._epoch = None
        self._due_at = math.inf

    @hookimpl(rank_zero=True)
    def exception(self) -> None:
        self._epoch = None
        self._due_at = math.inf

    def _write(self, line: str) -> None:
        self._due_at = time.perf_counter() + self._interval_s
        self._write_line(one_line(line))


class EpochLine:
    """Describes the progress of a fit through its epochs.

    Times are in seconds, as from `time.perf_counter`.

    Args:
        clock: the clock of the run.
        until: the end of the fit.
        now: the current time.
        num_batches: the number of batches of an epoch, if known.

    Attributes:
        num_batches: the number of batches of an epoch, once known.
        results: the results of the latest evaluation in the current epoch.
    """

    def __init__(self, clock: Clock, until: Time, now: float, num_batches: int | None) -> None:
        self._clock = clock
        self._until = until
        self._paused_at: float | None = None
        self.num_batches = num_batches
        self.start(now, num_batches)

    def start(self, now: float, num_batches: int | None) -> None:
        """Records the start of an epoch, or the position from which it is resumed.

        Args:
            num_batches: the number of batches of this epoch; None to use that of an earlier epoch.
        """
        clock = self._clock
        self.results: Results = {}
        self.num_batches = self.num_batches if num_batches is None else num_batches
        self._idx = clock.epoch
        self._batch_before = clock.batch - clock.batch_in_epoch
        self._began_sample = clock.sample
        self._began_s = now
        self._paused_s = 0.0

    def end(self) -> None:
        """Records the number of batches of a whole epoch."""
        if self.num_batches is None and self._is_done:
            self.num_batches = self._clock.batch - self._batch_before

    def pause(self, now: float) -> None:
        """Pauses the timer for an evaluation."""
        self._paused_at = now

    def resume(self, now: float) -> None:
        """Resumes the timer after an evaluation."""
        if self._paused_at is not None:
            self._paused_s += now - max(self._paused_at, self._began_s)
            self._paused_at = None

    def text(self, now: float, loss: float | None, *, with_results: bool = False) -> str:
        """Returns the line for the current epoch.

        Args:
            loss: the mean loss of the epoch or the latest loss; None to omit it.
        """
        parts = [self.epoch]
        if self._until.unit != "ep":
            parts.append(self.amount)
        elif not self._is_done:
            parts.append(self.batch)
        if loss is not None:
            parts.append(f"loss {short(loss)}")
        for eval_set, metrics in self.results.items() if with_results else ():
            parts += [
                f"{metric_name(eval_set, name)} {short(value)}" for name, value in metrics.items()
            ]
        seconds = now - self._began_s
        samples = self._clock.sample - self._began_sample
        if samples and seconds > self._paused_s:
            parts.append(per_second(samples / (seconds - self._paused_s)))
        return "  ".join([*parts, duration(seconds)])

    @property
    def is_under_way(self) -> bool:
        """Whether the epoch has batches left, as far as known."""
        is_last = self._clock.batch_in_epoch == self.num_batches
        return not (self._is_done or is_last or self._clock.reached(self._until))

    @property
    def epoch(self) -> str:
        """The current epoch, with the total if known: epoch 3/10."""
        total = f"/{self._until.value:,}" if self._until.unit == "ep" else ""
        return f"epoch {self._idx + 1}{total}"

    @property
    def batch(self) -> str:
        """The number of finished batches of the epoch: batch 12/45."""
        total = "" if self.num_batches is None else f"/{self.num_batches:,}"
        return f"batch {self._clock.batch - self._batch_before:,}{total}"

    @property
    def position(self) -> str:
        """The progress of the run: epoch 3/10, batch 12/45; or epoch 3, batch 120/500."""
        return f"{self.epoch}, {self.amount if self.counts_batches else self.batch}"

    @property
    def amount(self) -> str:
        """The progress of a run that isn't counted in epochs: batch 200/500."""
        clock = self._clock
        end = self._until.value
        return {
            "ep": "",
            "ba": f"batch {clock.batch:,}/{end:,}",
            "sp": f"sample {clock.sample:,}/{end:,}",
            "tok": f"token {clock.token:,}/{end:,}",
            "sec": f"time {clock_time(clock.seconds)}/{clock_time(end)}",
        }[self._until.unit]

    @property
    def counts_batches(self) -> bool:
        """Whether the run ends after a number of batches."""
        return self._until.unit == "ba"

    @property
    def _is_done(self) -> bool:
        return self._clock.epoch > self._idx


def mean_loss(state: StateView) -> float | None:
    """Returns the mean loss of the epoch as last computed; waits for the device."""
    loss = state.train_metrics.get("loss")
    return None if loss is None else loss.item()


def scalars(metrics: Mapping[str, Mapping[str, Tensor]]) -> Results:
    """Returns the metrics that are scalars; waits for the device."""
    results = {}
    for dataset, values in metrics.items():
        results[shortened(dataset)] = {
            shortened(name): value.item() for name, value in values.items() if value.numel() == 1
        }
    return results


def short(value: float) -> str:
    """Formats a number with about four digits: 0.4120, 98.20, 12,345, 1.20e-05, nan."""
    if not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return f"{value:,}" if isinstance(value, int) and abs(value) < 1e9 else f"{value:g}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:#.4g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.2e}"


def per_second(samples_per_s: float) -> str:
    """Formats a speed: 1,234 samples/s."""
    number = f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
    return f"{number} samples/s"


def duration(seconds: float) -> str:
    """Formats a duration: 3.1 s, 2:05, 1:02:05."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return clock_time(seconds)


def clock_time(seconds: float) -> str:
    """Formats a duration in whole seconds: 0:03, 2:05, 1:02:05."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"


def shortened(name: str) -> str:
    """Shortens a long name by omitting its middle."""
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[:60]}...{name[-30:]}"
