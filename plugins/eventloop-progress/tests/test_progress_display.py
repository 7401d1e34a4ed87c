"""Numbers, durations and names."""

import pytest

from eventloop.toolbox import clock_time, duration, per_second, short
from eventloop_progress.display import printable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41204, "0.4120"), (1.0, "1.000"), (98.2, "98.20"), (-0.5, "-0.5000"), (0.0, "0"),
        (12345.6, "12,346"), (999.96, "1000."), (1.2e-5, "1.20e-05"), (3.4e38, "3.40e+38"),
        (7, "7"), (12345, "12,345"), (10**12, "1e+12"), (True, "1"),
        (float("nan"), "nan"), (float("-inf"), "-inf"),
    ],
)  # fmt: skip
def test_numbers_are_short(value, text):
    """A number whose width changes at each step can't be read."""
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (3.14, "3.1 s"), (59.94, "59.9 s"), (59.97, "1:00"), (3725, "1:02:05")],
)
def test_durations_get_the_units_they_need(seconds, text):
    """Nobody reads 3725 s."""
    assert duration(seconds) == text


def test_times_left_are_in_whole_seconds():
    """Tenths would flicker."""
    assert [clock_time(value) for value in (0.2, 9.6, 125)] == ["0:00", "0:10", "2:05"]


def test_speeds_keep_their_digits():
    """Large models do less than a sample a second."""
    texts = [per_second(value) for value in (1234.4, 12.34, 0.0314)]

    assert texts == ["1,234 samples/s", "12.3 samples/s", "0.0314 samples/s"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_any_name_can_be_printed(encoding):
    """A name must end neither its line nor the training."""
    name = printable("a\nb\x1b[31m \u00fc \u6f22 \ud800", encoding)

    assert name.encode(encoding).decode(encoding) == name
    assert name.startswith("a?b?[31m ")
