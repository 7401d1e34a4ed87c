"""The progress of a fit, its speed, and its remaining time."""

from __future__ import annotations

from collections import deque

from eventloop import Clock, Time

RECENT_S = 5.0


def frac_done(clock: Clock, until: Time, batches_per_epoch: int | None) -> float:
    """Returns the share of the run that is done, in [0, 1].

    Args:
        until: the end, in any unit that a clock counts.
        batches_per_epoch: number of batches in an epoch; if unknown, only whole epochs count.
    """
    if until.unit == "ep":
        frac_of_epoch = clock.batch_in_epoch / batches_per_epoch if batches_per_epoch else 0.0
        amount_done = clock.epoch + min(1.0, frac_of_epoch)
    else:
        counts = {"ba": clock.batch, "sp": clock.sample, "tok": clock.token, "sec": clock.seconds}
        amount_done = counts[until.unit]
    return max(0.0, min(1.0, amount_done / until.value))


class Pace:
    """Measures the pace of a fit from observed positions; all times are seconds of the same clock.

    Samples per second cover the last few seconds of training, without evaluation. The remaining time
    comes from the average since the first batch, with evaluation; the first batch itself is left out,
    because it includes compilation and the start of data loading.

    Args:
        now_s: time when the fit began.
        sample: number of samples done by then.
        frac: share of the run done by then.
    """

    def __init__(self, now_s: float, sample: int, frac: float) -> None:
        self._began = now_s
        self._began_frac = frac
        self._origin: tuple[float, float] | None = None
        self._latest = (now_s, frac)
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._recent = deque([(0.0, sample)])

    def busy_s(self, now_s: float) -> float:
        """Returns the seconds of training since the fit began, without evaluation."""
        until = now_s if self._paused_at is None else self._paused_at
        return until - self._began - self._paused_s

    def elapsed_s(self, now_s: float) -> float:
        """Returns the seconds since the fit began."""
        return now_s - self._began

    def pause(self, now_s: float) -> None:
        """Stops counting time while an evaluation runs."""
        if self._paused_at is None:
            self._paused_at = now_s

    def resume(self, now_s: float) -> None:
        """Counts time again after an evaluation."""
        if self._paused_at is not None:
            self._paused_s += now_s - self._paused_at
            self._paused_at = None

    def observe(self, now_s: float, sample: int, frac: float) -> None:
        """Records how much is done by now; call it as often as the figures should refresh."""
        self._latest = (now_s, frac)
        if self._origin is None and frac > self._began_frac:
            self._origin = (now_s, frac)
        if sample != self._recent[-1][1]:
            self._recent.append((self.busy_s(now_s), sample))
        while len(self._recent) > 2 and self._recent[-1][0] - self._recent[1][0] >= RECENT_S:
            self._recent.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """The recent speed of training; None until a batch is done."""
        (first_s, first_sample), (last_s, last_sample) = self._recent[0], self._recent[-1]
        return (last_sample - first_sample) / (last_s - first_s) if last_s > first_s else None

    @property
    def seconds_left(self) -> float | None:
        """The remaining time at the average pace; None until the pace is known."""
        if self._origin is None or self._latest[1] <= self._origin[1]:
            return None
        seconds = self._latest[0] - self._origin[0]
        frac_done_since = self._latest[1] - self._origin[1]
        return (1.0 - self._latest[1]) * seconds / frac_done_since
