"""The plugin: shows the events of a run on a display."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console

from eventloop import Moment, hookimpl
from eventloop.toolbox import (
    EpochLine,
    clock_time,
    known_length,
    mean_loss,
    per_second,
    scalars,
    short,
    shortened,
)
from eventloop_progress.bar import BAR, Field
from eventloop_progress.display import Display, display_on, printable
from eventloop_progress.pace import Pace, frac_done

_TRAIN = "train"

if TYPE_CHECKING:
    from pathlib import Path

    from eventloop import StateView


class Progress:
    """Shows how a run goes: a bar and a table of results, or a line for each epoch.

    In a terminal or a notebook, a bar shows epoch, batch, loss, samples per second and the remaining time,
    and each evaluation adds its results to a table above the bar. Elsewhere, each epoch is a line, each
    evaluation within an epoch another, and in between there is a line at intervals.

    Args:
        refresh_per_s: maximum number of refreshes of the bar per second.
        interval_s: maximum time between lines where no bar is drawn, in seconds.

    Attributes:
        console: the `rich.console.Console` that everything is printed to, standard output at
            first; may be replaced before training.

    Raises:
        ValueError: `refresh_per_s` or `interval_s` isn't a positive number.
    """

    needs_eval_data = True
    shows_progress = True  # the core's lines stay out

    def __init__(self, *, refresh_per_s: float = 10.0, interval_s: float = 60.0) -> None:
        for name, value in (("refresh_per_s", refresh_per_s), ("interval_s", interval_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} isn't a positive number")
        self.console = Console()
        # Even with FORCE_COLOR, which continuous integration sets, a file isn't a terminal.
        self.console.is_interactive &= self.console.file.isatty()
        self._refresh_s = 1 / refresh_per_s
        self._interval_s = interval_s
        self._draw_at = math.inf
        self._display: Display = display_on(self.console)
        self._fit: EpochLine | None = None
        self._pace = Pace(0.0, 0, 0.0)
        self._loss: float | None = None
        self._num_evaluated = 0
        self._is_resumed = False
        self._saved_in = ""

    @hookimpl(rank_zero=True)
    def before_load(self) -> None:
        """Records that the run resumes from a checkpoint."""
        self._is_resumed = True

    @hookimpl(rank_zero=True)
    def fit_start(self, state: StateView) -> None:
        """Draws the bar for the first time; notes where a resumed run starts."""
        self._display = display_on(self.console)
        now_s = time.perf_counter()
        num_batches = state.num_batches
        self._fit = EpochLine(state.clock, state.until, now_s, num_batches)
        frac = frac_done(state.clock, state.until, num_batches)
        self._pace = Pace(now_s, state.clock.sample, frac)
        if self._is_resumed:
            self._is_resumed = False
            self._display.note(f"resumed at {self._fit.position}")
        self._draw(state)

    @hookimpl(rank_zero=True)
    def epoch_start(self, state: StateView) -> None:
        """Records where the epoch begins."""
        if self._fit is not None:
            self._fit.start(time.perf_counter(), state.num_batches)

    @hookimpl(rank_zero=True)
    def batch_end(self, state: StateView) -> None:
        """Draws the bar, or writes a line, if it is due; most steps only pay for this comparison."""
        if time.perf_counter() >= self._draw_at:
            self._draw(state)

    @hookimpl(rank_zero=True)
    def log(self, state: StateView, numbers: dict[str, float], at: Moment) -> None:
        """Takes the loss from the logged numbers, which are on the host already."""
        loss = numbers.get("train/loss")
        self._loss = self._loss if loss is None else loss

    @hookimpl(rank_zero=True)
    def log_text(
        self, state: StateView, texts: dict[str, str | dict[str, list[Any]]], at: Moment
    ) -> None:
        """Shows the beginning of each text and table."""
        for name, text in texts.items():
            self._display.text(name, text)

    @hookimpl(rank_zero=True)
    def eval_before_all(self, state: StateView) -> None:
        """Pauses the timing of the training."""
        if self._fit is None:
            self._display = display_on(self.console)
        else:
            now_s = time.perf_counter()
            self._pace.pause(now_s)
            self._fit.pause(now_s)

    @hookimpl(rank_zero=True)
    def eval_start(self, state: StateView) -> None:
        """Shows which data loader is evaluated."""
        self._num_evaluated = 0
        self._draw(state)

    @hookimpl(rank_zero=True)
    def eval_batch_end(self, state: StateView) -> None:
        """Shows the progress of the evaluation, if it is due."""
        self._num_evaluated += 1
        if time.perf_counter() >= self._draw_at:
            self._draw(state)

    @hookimpl(rank_zero=True)
    def eval_after_all(self, state: StateView) -> None:
        """Shows the results; this synchronizes with the device.

        Outside of a fit only their caller gets them.
        """
        if self._fit is None:
            self._display.close(keep=False)
            return
        clock = state.clock
        loss = mean_loss(state)
        results = scalars({name: state.eval_metrics[name] for name in state.eval_sets})
        train = {} if loss is None or _TRAIN in results else {_TRAIN: {"loss": loss}}
        epoch = clock.epoch + (clock.batch_in_epoch > 0)
        self._display.results(epoch, clock.batch, {**train, **results})
        now_s = time.perf_counter()
        self._pace.resume(now_s)
        self._fit.resume(now_s)
        self._fit.results = results
        if results and self._fit.is_under_way:  # at the end of an epoch, its line has the results
            self._write(self._fit.text(now_s, loss, with_results=True))
        self._draw(state)

    @hookimpl(rank_zero=True)
    def checkpoint_saved(self, path: Path) -> None:
        """Prints where checkpoints are saved, once."""
        if self._saved_in != str(path.parent):
            self._saved_in = str(path.parent)
            self._display.note(f"checkpoints are saved in {self._saved_in}")

    @hookimpl(rank_zero=True)
    def epoch_end(self, state: StateView) -> None:
        """Records the length of the epoch, if the data loader has no length."""
        if self._fit is not None:
            self._fit.end()

    @hookimpl(rank_zero=True)
    def epoch_checkpoint(self, state: StateView) -> None:
        """Reports the epoch, after the evaluation at its end."""
        if self._fit is not None:
            now_s = time.perf_counter()
            self._write(self._fit.text(now_s, mean_loss(state), with_results=True))

    @hookimpl(rank_zero=True)
    def fit_end(self, state: StateView) -> None:
        """Draws the bar in its final state and leaves it on screen."""
        self._draw(state, ended=True)
        self._leave()

    @hookimpl(rank_zero=True)
    def exception(self) -> None:
        """Restores the terminal before the error is printed."""
        self._leave()

    @hookimpl(rank_zero=True)
    def close(self) -> None:
        """Restores the terminal, if necessary."""
        self._leave()

    def _leave(self) -> None:
        self._fit = None
        self._draw_at = math.inf
        self._display.close(keep=True)

    def _write(self, line: str) -> None:
        self._display.line(line)
        if not self._display.draws:
            self._draw_at = time.perf_counter() + self._interval_s

    def _draw(self, state: StateView, *, ended: bool = False) -> None:
        now_s = time.perf_counter()
        if not self._display.draws:
            self._write_if_due(now_s)
            return
        if self._fit is None:
            self._display.draw(*self._evaluation(state))
        else:
            frac = self._observe(state, self._fit, now_s)
            self._display.draw(self._fields(state, self._fit, now_s, ended=ended), frac)
        self._draw_at = now_s + self._refresh_s

    def _write_if_due(self, now_s: float) -> None:
        """Writes a line of progress, with the latest logged loss, without synchronizing with the device."""
        if self._fit is not None and now_s >= self._draw_at:
            self._write(self._fit.text(now_s, self._loss))
        elif self._draw_at == math.inf:
            self._draw_at = now_s + self._interval_s

    def _fields(
        self, state: StateView, fit: EpochLine, now_s: float, *, ended: bool
    ) -> list[Field]:
        seconds_left = self._pace.seconds_left
        speed = self._pace.samples_per_s
        if ended:
            time_text = clock_time(self._pace.elapsed_s(now_s))
        else:
            time_text = "" if seconds_left is None else f"{clock_time(seconds_left)} left"
        batch, amount = (fit.amount, "") if fit.counts_batches else (fit.batch, fit.amount)
        return [
            Field(fit.epoch, 7, "bold"),
            Field(batch if state.eval_name is None else self._evaluated(state), 6),
            Field(amount, 1),
            BAR,
            Field("" if self._loss is None else f"loss {short(self._loss)}", 5),
            Field("" if speed is None else per_second(speed), 2, "dim"),
            Field(time_text, 4),
        ]

    def _observe(self, state: StateView, fit: EpochLine, now_s: float) -> float:
        """Updates the pace; returns the fraction of the run that is done."""
        frac = frac_done(state.clock, state.until, fit.num_batches)
        self._pace.observe(now_s, state.clock.sample, frac)
        return frac

    def _evaluation(self, state: StateView) -> tuple[list[Field], float]:
        """Returns the fields and the progress of an evaluation outside of a fit."""
        num_batches = known_length(state.eval_dataloaders[state.eval_name or ""])
        frac = self._num_evaluated / num_batches if num_batches else 0.0
        return [Field("evaluation", 7, "bold"), Field(self._evaluated(state), 6), BAR], frac

    def _evaluated(self, state: StateView) -> str:
        num_batches = known_length(state.eval_dataloaders[state.eval_name or ""])
        total = "" if num_batches is None else f"/{num_batches:,}"
        name = printable(shortened(state.eval_name or ""), self.console.encoding)
        return f"{name} {self._num_evaluated:,}{total}"
