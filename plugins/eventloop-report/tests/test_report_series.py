"""Numbers in bounded memory."""

import itertools
import math

import pytest

from eventloop_report import Numbers, Series
from eventloop_report.series import MAX_POINTS, MAX_SERIES


def series_of(values):
    series = Series()
    for batch, value in enumerate(values, 1):
        series.add(batch, value)
    return series


@pytest.mark.parametrize("num", [0, 1, 999, 1000, 1001, 5003, 64_000])
def test_a_long_run_is_drawn_by_means_of_neighbours(num):
    """However long it is, its points are few, in order, and their means those of the values."""
    series = series_of([float(batch) for batch in range(num)])

    points = series.points()

    assert len(points) <= MAX_POINTS
    assert series.num_values == num
    bounds = [0, *(batch for batch, _ in points)]
    expected = [sum(range(a, b)) / (b - a) for a, b in itertools.pairwise(bounds)]
    assert [value for _, value in points] == pytest.approx(expected)
    assert bounds[-1] == num


def test_a_short_run_keeps_every_value():
    """Control."""
    assert series_of([3.0, 1.0, 2.0]).points() == [(1, 3.0), (2, 1.0), (3, 2.0)]


def test_what_is_not_finite_is_a_gap():
    """It has no place on an axis, and must not spoil the mean of its neighbours."""
    series = series_of([1.0, math.nan, 3.0] + [math.inf] * 1997)

    points = series.points()

    assert points[0] == (4, 2.0)  # of 1 and 3
    assert all(math.isnan(value) for _, value in points[1:])
    assert series.latest == math.inf


@pytest.mark.parametrize("num", [0, 3, 1500])
def test_a_series_goes_on_where_it_was_saved(num):
    """A resumed run's curve is that of one in one go."""
    values = [math.sin(batch) for batch in range(2600)]
    whole, first, second = series_of(values), series_of(values[:num]), Series()
    second.load_state_dict(first.state_dict())

    for batch, value in enumerate(values[num:], num + 1):
        second.add(batch, value)

    assert second.points() == whole.points()
    assert second.latest == whole.latest


def test_many_names_do_not_fill_the_memory():
    """A plugin that logs a number under a new name each batch would."""
    numbers = Numbers()
    for idx in range(MAX_SERIES + 7):
        numbers.add(f"name/{idx}", 1, 1.0)
        numbers.add("name/0", 2, 1.0)
    copy = Numbers()
    copy.load_state_dict(numbers.state_dict())

    assert len(copy.by_name) == MAX_SERIES
    assert numbers.num_left_out == copy.num_left_out == 7
