"""What is known of the fit under way."""

from __future__ import annotations

from eventloop import Clock, Time
from eventloop_progress.pace import Pace, frac_done
from eventloop_progress.reports import Report
from eventloop_progress.text import Results, clock_time


class Fit:
    """Follows the clock of a fit through its epochs.

    Args:
        clock: the run's, which the loop moves.
        until: where the fit ends.
        now: in seconds, as `time.perf_counter` counts them.
        num_batches: of an epoch, where the data loader knows.

    Attributes:
        results: the latest of the epoch under way.
    """

    def __init__(self, clock: Clock, until: Time, now: float, num_batches: int | None) -> None:
        self._clock = clock
        self._until = until
        self._num_batches = num_batches
        self.pace = Pace(now, clock.sample, frac_done(clock, until, num_batches))
        self.epoch_start(now, num_batches)

    def epoch_start(self, now: float, num_batches: int | None) -> None:
        """Notes where an epoch begins, or goes on.

        Args:
            num_batches: of this epoch, where the data loader knows; else what an earlier one had.
        """
        clock = self._clock
        self.results: Results = {}
        self._num_batches = self._num_batches if num_batches is None else num_batches
        self._epoch_idx = clock.epoch
        self._batch_before_epoch = clock.batch - clock.batch_in_epoch
        self._epoch_began_sample = clock.sample
        self._epoch_began_s = self.pace.elapsed_s(now)
        self._epoch_began_busy_s = self.pace.busy_s(now)

    def epoch_end(self) -> None:
        """Learns from a whole epoch how many batches it has."""
        if self._num_batches is None and self._is_epoch_done:
            self._num_batches = self._clock.batch - self._batch_before_epoch

    def observe(self, now: float) -> float:
        """Lets the pace know where the run is; gives the share that is done."""
        frac = frac_done(self._clock, self._until, self._num_batches)
        self.pace.observe(now, self._clock.sample, frac)
        return frac

    def report(self, now: float, loss: float | None, *, with_results: bool = True) -> Report:
        """Sums the epoch up, as far as it is done.

        Args:
            loss: the mean over its samples, or the latest within it, where there is one.
        """
        busy_s = self.pace.busy_s(now) - self._epoch_began_busy_s
        samples = self._clock.sample - self._epoch_began_sample
        by_epochs = self._until.unit == "ep"
        where = self.amount if not by_epochs else "" if self._is_epoch_done else self.batch
        return Report(
            position=f"{self.epoch}  {where}".rstrip(),
            loss=loss,
            results=self.results if with_results else {},
            samples_per_s=samples / busy_s if samples else None,
            seconds=self.pace.elapsed_s(now) - self._epoch_began_s,
        )

    @property
    def is_in_epoch(self) -> bool:
        """Whether the epoch under way has batches to come, as far as that is known."""
        is_last = self._clock.batch_in_epoch == self._num_batches
        return not (self._is_epoch_done or is_last or self._clock.reached(self._until))

    @property
    def epoch(self) -> str:
        """The epoch under way, of how many where that is known: epoch 3/10."""
        of = f"/{self._until.value:,}" if self._until.unit == "ep" else ""
        return f"epoch {self._epoch_idx + 1}{of}"

    @property
    def batch(self) -> str:
        """How many batches of the epoch are done: batch 12/45."""
        of = "" if self._num_batches is None else f"/{self._num_batches:,}"
        return f"batch {self._clock.batch - self._batch_before_epoch:,}{of}"

    @property
    def position(self) -> str:
        """Where the run is: epoch 3/10, batch 12/45; or epoch 3, batch 120/500."""
        return f"{self.epoch}, {self.amount if self.counts_batches else self.batch}"

    @property
    def amount(self) -> str:
        """How much of a run that isn't counted in epochs is done: batch 200/500."""
        clock, end = self._clock, self._until.value
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
    def _is_epoch_done(self) -> bool:
        return self._clock.epoch > self._epoch_idx
