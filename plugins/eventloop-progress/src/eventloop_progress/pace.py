"""How far a fit is, how fast it goes, and how long it will take."""

from __future__ import annotations

from collections import deque

from eventloop import Clock, Time

RECENT_S = 5.0


def frac_done(clock: Clock, until: Time, batches_per_epoch: int | None) -> float:
    """Returns the share of the run that is done, in [0, 1].

    Args:
        until: the end, in any unit that a clock counts.
        batches_per_epoch: where it is known; else only whole epochs count towards a number of them.
    """
    if until.unit == "ep":
        part = clock.batch_in_epoch / batches_per_epoch if batches_per_epoch else 0.0
        done = clock.epoch + min(1.0, part)
    else:
        counts = {"ba": clock.batch, "sp": clock.sample, "tok": clock.token, "sec": clock.seconds}
        done = counts[until.unit]
    return max(0.0, min(1.0, done / until.value))


class Pace:
    """Measures the pace of a fit from observed positions; all times are in seconds of one clock.

    Samples a second are those of the last few seconds of training; evaluation doesn't slow them.
    The time left comes from the average since the first batch, evaluation included; the first
    batch itself, which waits for compilation and for data, is left out.

    Args:
        now: when the fit began.
        sample: samples done by then.
        frac: share of the run done by then.
    """

    def __init__(self, now: float, sample: int, frac: float) -> None:
        self._began = now
        self._began_frac = frac
        self._origin: tuple[float, float] | None = None
        self._latest = (now, frac)
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._recent = deque([(0.0, sample)])

    def busy_s(self, now: float) -> float:
        """Returns the seconds of training since the fit began, without evaluation."""
        until = now if self._paused_at is None else self._paused_at
        return until - self._began - self._paused_s

    def elapsed_s(self, now: float) -> float:
        """Returns the seconds since the fit began."""
        return now - self._began

    def pause(self, now: float) -> None:
        """Stops counting time while an evaluation runs."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """Counts time again after an evaluation."""
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def observe(self, now: float, sample: int, frac: float) -> None:
        """Records how much is done by now; call it as often as the figures should be fresh."""
        self._latest = (now, frac)
        if self._origin is None and frac > self._began_frac:
            self._origin = (now, frac)
        if sample != self._recent[-1][1]:
            self._recent.append((self.busy_s(now), sample))
        while len(self._recent) > 2 and self._recent[-1][0] - self._recent[1][0] >= RECENT_S:
            self._recent.popleft()

    @property
    def samples_per_s(self) -> float | None:
        """The latest speed of training; None until a batch is done."""
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    @property
    def seconds_left(self) -> float | None:
        """The time until the end at the average pace; None until there is one."""
        if self._origin is None or self._latest[1] <= self._origin[1]:
            return None
        seconds, done = (
            after - before for after, before in zip(self._latest, self._origin, strict=True)
        )
        return (1.0 - self._latest[1]) * seconds / done
