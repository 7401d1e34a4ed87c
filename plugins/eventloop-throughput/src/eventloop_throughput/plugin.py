"""The plugin: measures time and operations, and logs rates."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from eventloop import PluginError, hookimpl
from eventloop.devices import kind_of
from eventloop.toolbox import as_option
from eventloop_throughput.flops import ForwardFlops, is_compiled
from eventloop_throughput.peaks import peak_tflops
from eventloop_throughput.waits import TRAIN_DATA, Waits
from eventloop_throughput.window import Amounts, Window

if TYPE_CHECKING:
    from eventloop import StateView, Time


class Throughput:
    """Logs how fast the training is, over the latest batches.

    At log intervals: samples, tokens and steps a second of all ranks together, the share of time
    spent waiting for data, TFLOP/s and MFU of the model, and the memory on CUDA devices. After an
    evaluation: the share of its time spent waiting, for each set. A line at the end of a run names
    the data that it waited for, if that was more than a tenth of the time.

    Args:
        window: how many of the latest batches the numbers are of.
        peak_tflops: the peak rate of the device in the run's precision, in TFLOP/s, for
            MFU; not set: known for common GPUs.
        gflops_per_sample: floating-point operations of a sample's forward and backward pass, in
            GFLOP; not set: counted, but not under `compile`.
        gflops_per_token: likewise of a token that the task counts; for a language model about 6e-9
            times the number of parameters.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value isn't positive, `window` is less than one batch, or both GFLOP options are given.
    """

    def __init__(
        self,
        *,
        window: int = 100,
        peak_tflops: float | None = None,
        gflops_per_sample: float | None = None,
        gflops_per_token: float | None = None,
    ) -> None:
        if not isinstance(window, int):
            raise TypeError(f"window={window!r} is not a number of batches")
        for name, value in (
            ("peak_tflops", peak_tflops),
            ("gflops_per_sample", gflops_per_sample),
            ("gflops_per_token", gflops_per_token),
        ):
            if value is not None and not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} is not a number")
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value!r} isn't a positive number")
        if gflops_per_sample is not None and gflops_per_token is not None:
            raise ValueError("gflops_per_sample and gflops_per_token are both given: leave one out")
        self.window = window
        self.peak_tflops = peak_tflops
        self.gflops_per_sample = gflops_per_sample
        self.gflops_per_token = gflops_per_token
        self._latest = Window(window)
        self._peak_tflops = peak_tflops
        self._interval: Time | None = None
        self._passes: ForwardFlops | None = None
        self._since = self._there_at = 0.0
        self._eval_since = self._eval_start = self._eval_wait_s = 0.0
        self._waits = Waits()
        self._is_first = True
        self._of_sets: dict[str, float] = {}
        self._flops = 0.0

    @hookimpl
    def after_load(self, state: StateView) -> None:
        """Settles whether operations are counted, and against which peak.

        Raises:
            PluginError: a peak was given, but there is nothing to compare it with.
        """
        is_hidden = bool(state.settings.compile) or is_compiled(state.model)
        is_given = self.gflops_per_sample is not None or self.gflops_per_token is not None
        counts = not is_given and not is_hidden
        self._passes = ForwardFlops() if counts else None
        if self.peak_tflops is not None and not counts and not is_given:
            raise PluginError(
                f"peak_tflops={self.peak_tflops} has no effect: a compiled model's operations "
                "can't be counted",
                fix="give them with "
                + as_option("throughput", gflops_per_sample=2.0)
                + " or "
                + as_option("throughput", gflops_per_token=0.75)
                + ", or leave the peak out",
            )
        if self.peak_tflops is None:
            name = kind_of(state.device).describe()
            self._peak_tflops = peak_tflops(name, state.precision.name)

    @hookimpl
    def fit_start(self, state: StateView) -> None:
        """Settles when to log: with the numbers of the core."""
        self._interval = state.resolve(state.settings.log_interval)

    @hookimpl
    def epoch_start(self, state: StateView) -> None:
        """Starts the time of waiting for data."""
        self._since = time.perf_counter()

    @hookimpl
    def should_stop(self, state: StateView) -> None:
        """Starts the time of waiting for data after evaluation and saving; never asks for a stop."""
        self._since = time.perf_counter()

    @hookimpl
    def after_dataloader(self, state: StateView) -> None:
        """Ends the time of waiting for data."""
        self._there_at = time.perf_counter()

    @hookimpl
    def before_forward(self, state: StateView) -> None:
        """Begins to count the operations of a pass, if its shapes are new."""
        if self._passes is not None:
            self._passes.before(state.model, state.inputs)

    @hookimpl
    def after_forward(self, state: StateView) -> None:
        """Adds up the operations of the batch."""
        if self._passes is not None:
            self._flops += self._passes.after()

    @hookimpl
    def batch_end(self, state: StateView) -> None:
        """Adds the batch to the window; logs, if it is time."""
        now_s = time.perf_counter()
        clock = state.clock
        flops = self._flops
        self._flops = 0.0
        if self.gflops_per_sample is not None:
            flops = 1e9 * self.gflops_per_sample * state.count.samples
        elif self.gflops_per_token is not None:
            flops = 1e9 * self.gflops_per_token * state.count.tokens
        seconds = now_s - self._since
        wait_s = self._there_at - self._since
        if not self._is_first:  # it waits for workers to start
            self._waits.add(TRAIN_DATA, wait_s, seconds)
        self._is_first = False
        self._latest.add(
            Amounts(
                seconds=seconds,
                wait_s=wait_s,
                batches=1,
                samples=clock.sample - clock.previous.sample,
                tokens=clock.token - clock.previous.token,
                flops=flops,
            )
        )
        if self._interval is not None and clock.crossed(self._interval):
            self._log(state)

    @hookimpl
    def eval_start(self, state: StateView) -> None:
        """Starts the time of waiting for the set's first batch."""
        self._eval_start = self._eval_since = time.perf_counter()
        self._eval_wait_s = 0.0

    @hookimpl
    def eval_batch_start(self, state: StateView) -> None:
        """Ends the time of waiting for a batch of the set."""
        self._eval_wait_s += time.perf_counter() - self._eval_since

    @hookimpl
    def eval_batch_end(self, state: StateView) -> None:
        """Starts the time of waiting for the set's next batch."""
        self._eval_since = time.perf_counter()

    @hookimpl
    def eval_end(self, state: StateView) -> None:
        """Adds the waiting and total time of the set."""
        assert state.eval_name is not None
        seconds = time.perf_counter() - self._eval_start
        self._waits.add(state.eval_name, self._eval_wait_s, seconds)
        self._of_sets[state.eval_name] = self._eval_wait_s / seconds if seconds else 0.0

    @hookimpl
    def eval_after_all(self, state: StateView) -> None:
        """Logs the share of the time that each set was waited for."""
        for name, frac in self._of_sets.items():
            state.log(f"throughput/data_wait_frac/{name}", frac, "mean")
        self._of_sets = {}

    @hookimpl(rank_zero=True)
    def training_end(self, state: StateView) -> None:
        """Writes a note to stderr if the run waited long for data, naming the data loaders."""
        dataloaders = {TRAIN_DATA: state.train_dataloader, **state.eval_dataloaders}
        line = self._waits.advice(dataloaders, is_host=kind_of(state.device).is_host)
        if line:
            sys.stderr.write(f"eventloop: {line}\n")

    @hookimpl
    def exception(self, state: StateView) -> None:
        """Lets the model go, if a pass failed while its operations were counted."""
        if self._passes is not None:
            self._passes.give_up()

    def _log(self, state: StateView) -> None:
        total = self._latest.total()
        if total is None:
            return
        numbers = {
            "samples_per_s": total.samples / total.seconds,
            "steps_per_s": total.batches / total.seconds,
            "data_wait_frac": total.wait_s / total.seconds,
        }
        if total.tokens:
            numbers["tokens_per_s"] = total.tokens / total.seconds
        # none are counted in a scripted model, or one without products of matrices
        if total.flops:
            numbers["tflops"] = total.flops / total.seconds / 1e12
            if self._peak_tflops is not None:
                numbers["mfu"] = numbers["tflops"] / self._peak_tflops
        # From torch's own books: the device isn't asked.
        for name, num_bytes in kind_of(state.device).memory().items():
            numbers[f"memory_{name}_gib"] = num_bytes / 2**30
        for name, value in numbers.items():
            # The clocks of the ranks differ a little.
            state.log(f"throughput/{name}", value, "mean")
