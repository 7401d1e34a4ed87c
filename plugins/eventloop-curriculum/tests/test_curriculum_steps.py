"""The times alone."""

import pytest

from eventloop import Moment, Time
from eventloop_curriculum import Steps

AT = Moment(epoch=3, batch=30, sample=240, token=9000, seconds=12.5)


@pytest.mark.parametrize(
    ("times", "reached"),
    [
        (["3ep"], 1),
        (["3.5ep"], 0),
        (["0ep", "1ep", "3ep", "4ep"], 3),
        (["4ep", "3ep", "0.0ep"], 2),
        (["30ba", "31ba"], 1),
        (["2e2sp"], 1),
        (["9_000tok", "1e4tok"], 1),
        (["12sec", "13sec"], 1),
        (["0.3dur", "0.31dur"], 1),
        (["0dur", "1dur"], 1),
        ([], 0),
    ],
)
def test_a_time_is_reached_in_its_own_unit(times, reached):
    """Of a run of 10 epochs, at the start of its fourth."""
    steps = Steps(dict.fromkeys(times, 1))

    assert steps.reached(AT, Time("10ep")) == reached


def test_values_come_in_order_of_their_times():
    """A mapping of a configuration file has none that anybody would rely on."""
    steps = Steps({"9ep": "c", "0ep": "a", Time("2ep"): "b"})

    assert steps.values == ["a", "b", "c"]


@pytest.mark.parametrize("times", [["1ep", "100ba"], ["1ep", "1.0ep"], ["0dur", "0ep"]])
def test_times_that_cannot_be_put_in_order_are_refused(times):
    """Which of 1ep and 100ba comes first depends on the data."""
    with pytest.raises(ValueError, match="have to be different ones in one unit"):
        Steps(dict.fromkeys(times, 1))


@pytest.mark.parametrize("time", ["0", "5 epochs", "0days", "-1ep", "2dur", 5])
def test_what_is_no_time_is_refused(time):
    """With what would be one."""
    with pytest.raises(ValueError, match=r"ep \(epochs\)|more than the whole run"):
        Steps({time: 1})


def test_a_share_of_an_unknown_length_is_refused():
    """Nobody could say when it comes."""
    with pytest.raises(ValueError, match="max_duration isn't set"):
        Steps({"0.5dur": 1}).reached(AT, None)
