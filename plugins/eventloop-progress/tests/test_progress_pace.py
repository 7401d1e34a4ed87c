"""How far, how fast, how long."""

import pytest

from eventloop import Clock, Time
from eventloop_progress.pace import Pace, frac_done


def clock_after(*, epochs=0, batches=0):
    """Counts 10 batches an epoch of 4 samples, 8 tokens and half a second each."""
    clock = Clock()
    for idx in range(10 * epochs + batches):
        clock.end_batch(4, 8, 0.5)
        if idx % 10 == 9:
            clock.end_epoch()
    return clock


@pytest.mark.parametrize("until", ["4ep", "40ba", "160sp", "320tok", "20sec"])
def test_a_run_is_measured_in_the_unit_of_its_end(until):
    """25 of 40 batches are the same share, whatever they are counted in."""
    clock = clock_after(epochs=2, batches=5)

    assert frac_done(clock, Time(until), batches_per_epoch=10) == 0.625


def test_epochs_of_unknown_length_count_whole():
    """An infinite data loader says nothing about the epoch under way."""
    assert frac_done(clock_after(epochs=2, batches=5), Time("4ep"), None) == 0.5


@pytest.mark.parametrize(("until", "length"), [("2ep", 10), ("3ep", 1), ("1ba", 10)])
def test_the_share_never_exceeds_one(until, length):
    """An epoch can be longer than it was said to be, and the last batch overshoot a time."""
    assert frac_done(clock_after(epochs=2, batches=9), Time(until), length) == 1.0


def test_nothing_is_foretold_before_the_second_batch():
    """The first batch waits for compilation and for data, so it says nothing of the others."""
    pace = Pace(now_s=100.0, sample=0, frac=0.0)

    pace.observe(100.0, 0, 0.0)
    at_first = pace.seconds_left, pace.samples_per_s
    pace.observe(160.0, 4, 0.01)

    assert at_first == (None, None)
    assert pace.seconds_left is None


def test_time_left_is_that_of_the_average_step():
    """After a slow first batch, 10 batches a second leave 8 seconds for 80 batches."""
    pace = Pace(now_s=100.0, sample=0, frac=0.0)
    pace.observe(160.0, 4, 0.01)

    pace.observe(161.9, 80, 0.20)

    assert pace.seconds_left == pytest.approx(8.0)


def test_a_fit_that_goes_on_foretells_from_its_own_steps():
    """What an earlier fit or process did took none of this one's time."""
    pace = Pace(now_s=0.0, sample=500, frac=0.5)
    pace.observe(1.0, 510, 0.51)
    pace.observe(2.0, 520, 0.52)

    assert pace.seconds_left == pytest.approx(48.0)
    assert pace.samples_per_s == pytest.approx(10.0)


def test_evaluation_does_not_slow_the_samples_a_second():
    """A minute of evaluation would hide how fast the training is."""
    pace = Pace(now_s=0.0, sample=0, frac=0.0)
    pace.observe(1.0, 100, 0.1)
    pace.pause(1.0)
    pace.observe(31.0, 100, 0.1)
    pace.resume(61.0)
    pace.observe(62.0, 200, 0.2)

    assert pace.samples_per_s == pytest.approx(100.0)
    assert pace.busy_s(62.0) == pytest.approx(2.0)
    assert pace.elapsed_s(62.0) == pytest.approx(62.0)


def test_the_speed_is_that_of_the_last_seconds():
    """A run that slows down must show it."""
    pace = Pace(now_s=0.0, sample=0, frac=0.0)
    for second in range(1, 101):
        samples = 100 * min(second, 50) + 10 * max(0, second - 50)
        pace.observe(float(second), samples, second / 100)

    assert pace.samples_per_s == pytest.approx(10.0)
