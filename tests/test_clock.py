"""Times and the clock."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from eventloop.clock import UNITS, Clock, Moment, Time, resolve

UNITS_TEXT = (
    "ep (epochs), ba (batches), sp (samples), tok (tokens), sec (seconds), "
    "dur (fraction of the run)"
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2ep", 2, "ep"),
        ("10_000ba", 10_000, "ba"),
        ("1e9tok", 1_000_000_000, "tok"),
        ("1e+3sp", 1000, "sp"),
        ("0.5dur", 0.5, "dur"),
        (".5dur", 0.5, "dur"),
        ("1.5ep", 1.5, "ep"),
        ("90sec", 90.0, "sec"),
        (" 3ba ", 3, "ba"),
        ("1dur", 1, "dur"),
    ],
)
def test_a_time_is_a_number_with_its_unit(text, value, unit):
    """As people write it in a flag, a file or Python."""
    time = Time(text)

    assert (time.value, time.unit) == (value, unit)
    assert time == Time(value, unit) == Time(time)


@pytest.mark.parametrize("unit", UNITS)
def test_a_time_is_printed_as_it_is_read(unit):
    """What the header shows can be pasted into a flag."""
    time = Time(1, unit)

    assert Time(str(time)) == time
    assert repr(time) == f"Time('{time}')"


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("5 epoch", "write '5ep': "),
        ("5epochs", "write '5ep': "),
        ("5 ep", "write '5ep': "),
        ("5EP", "write '5ep': "),
        ("1_000 steps", "write '1_000ba': "),
        ("10 batches", "write '10ba': "),
        ("2.5 seconds", "write '2.5sec': "),
        ("3s", "write '3sec': "),
        ("7 Tokens", "write '7tok': "),
        ("8samples", "write '8sp': "),
        ("60sa", "write '60sp': "),
        ("5", "write "),
        ("", "write "),
        ("ep", "write "),
        ("5 bananas", "write "),
        ("-1ep", "write "),
        ("nanep", "write "),
        ("1,000ba", "write "),
    ],
)
def test_what_is_no_time_is_refused_with_what_was_meant(text, suggestion):
    """`5 epoch` is the first thing that everybody tries."""
    with pytest.raises(ValueError, match="is not a time") as caught:
        Time(text)

    assert str(caught.value) == (
        f"{text!r} is not a time; {suggestion}a number with its unit, one of {UNITS_TEXT}"
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("0ep",), "0.0ep isn't a finite number above zero"),
        (("1e999ba",), "infba isn't a finite number above zero"),
        ((-2, "ba"), "-2ba isn't a finite number above zero"),
        ((float("nan"), "ba"), "nanba isn't a finite number above zero"),
        (("1.5ba",), "1.5ba is not a whole number of batches"),
        ((0.5, "tok"), "0.5tok is not a whole number of tokens"),
        (("1.5dur",), "1.5dur is more than the whole run, which is 1dur"),
        ((5,), f"5 has no unit of time; one of {UNITS_TEXT}"),
        ((5, "epoch"), f"5epoch has no unit of time; one of {UNITS_TEXT}"),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(args, message):
    """A run of no length, or of more than itself, is a slip."""
    with pytest.raises(ValueError, match=r"isn't|more than|no unit|not a whole") as caught:
        Time(*args)

    assert str(caught.value) == message


def test_a_time_can_not_change_and_can_be_a_key():
    """Settings hold them, frozen."""
    with pytest.raises(AttributeError):
        Time("1ep").value = 2

    assert {Time("1ep"): 1}[Time("1.0ep")] == 1


def test_the_clock_counts_in_every_unit():
    """In the run, and within the epoch."""
    clock = Clock()

    clock.end_batch(samples=4, tokens=40, seconds=0.5)
    clock.end_epoch()
    clock.end_batch(samples=3, tokens=30, seconds=0.25)

    assert clock.moment() == Moment(1, 2, 7, 70, 0.75)
    assert (clock.batch_in_epoch, clock.sample_in_epoch) == (1, 3)
    assert (clock.token_in_epoch, clock.seconds_in_epoch) == (30, 0.25)


@pytest.mark.parametrize(
    ("interval", "batches"),
    [("1ba", [1, 2, 3, 4]), ("3ba", [3]), ("5sp", [2, 3, 4]), ("8sp", [2, 4]), ("16sp", [4]),
     ("1sec", [2, 4]), ("100tok", [3]), ("1ep", [])],
)  # fmt: skip
def test_a_multiple_is_crossed_once(interval, batches):
    """On the first batch at or after it, however many it jumps over."""
    clock, crossed = Clock(), []

    for _ in range(4):
        clock.end_batch(samples=4, tokens=40, seconds=0.5)
        if clock.crossed(Time(interval)):
            crossed.append(clock.batch)

    assert crossed == batches


def test_what_the_last_batch_of_an_epoch_crossed_is_still_crossed_when_the_next_starts():
    """An implementation with every="2ba" on `batch_start` mustn't miss it."""
    clock = Clock()
    for _ in range(2):
        clock.end_batch(samples=4, tokens=0, seconds=1.0)

    clock.end_epoch()

    assert clock.crossed(Time("1ep"))
    assert clock.crossed(Time("2ba"))
    clock.end_batch(samples=4, tokens=0, seconds=1.0)
    assert not clock.crossed(Time("1ep"))
    assert not clock.crossed(Time("2ba"))


@pytest.mark.parametrize(("time", "reached"), [("2ba", True), ("3ba", False), ("8sp", True),
                                               ("9sp", False), ("1ep", False), ("1sec", True)])  # fmt: skip
def test_a_time_is_reached_from_the_start_of_the_run(time, reached):
    """`until` counts from there, not from now."""
    clock = Clock()
    for _ in range(2):
        clock.end_batch(samples=4, tokens=0, seconds=0.5)

    assert clock.reached(Time(time)) == reached


@pytest.mark.parametrize(
    ("time", "max_duration", "num_batches", "expected"),
    [
        ("2ep", None, None, "2ep"),
        ("0.5dur", "10ep", None, "5ep"),
        ("0.05dur", "10ep", 20, "10ba"),
        ("0.1dur", "1000ba", None, "100ba"),
        ("0.001dur", "100ba", None, "1ba"),
        ("1.5ep", None, 10, "15ba"),
        ("0.001ep", None, 10, "1ba"),
        ("0.024dur", "100ba", None, "2ba"),
        ("0.5dur", "3sec", None, "1.5sec"),
    ],
)
def test_a_fraction_becomes_what_a_clock_can_count(time, max_duration, num_batches, expected):
    """Of a run or of an epoch; never less than one."""
    duration = Time(max_duration) if max_duration else None

    assert resolve(Time(time), duration, num_batches) == Time(expected)


@pytest.mark.parametrize(
    ("time", "max_duration", "message"),
    [("0.5dur", None, "whose max_duration isn't set"),
     ("0.5ep", None, "the data loader has no length"),
     ("0.05dur", "10ep", "the data loader has no length")],
)  # fmt: skip
def test_a_fraction_of_an_unknown_length_is_refused(time, max_duration, message):
    """Rather than guessed."""
    with pytest.raises(ValueError, match=message):
        resolve(Time(time), Time(max_duration) if max_duration else None, None)


def test_a_time_is_its_value_and_unit_alone():
    """What else it keeps is neither told apart by, nor asked for."""
    time = Time("3ba")

    assert dataclasses.replace(time, value=5) == Time("5ba")
    assert pickle.loads(pickle.dumps(time)) == copy.deepcopy(time) == time
    assert pickle.loads(pickle.dumps(time))._idx == time._idx


def test_a_time_has_passed_when_it_was_over_a_batch_ago():
    """What was due at a time is due in the batch that reaches it, and never again."""
    clock = Clock()
    clock.end_batch(4, 0, 0.0)
    clock.end_batch(4, 0, 0.0)
    clock.end_epoch()

    assert clock.passed(Time("1ba"))
    assert not clock.passed(Time("2ba"))
    assert not clock.passed(Time("1ep"))
    assert clock.reached(Time("2ba"))


def test_the_epoch_that_people_read_is_counted_from_1():
    """A batch belongs to the epoch in which it was trained, also once that is over."""
    clock = Clock()
    numbers = [clock.epoch_number]

    for _ in range(2):
        for _ in range(2):
            clock.end_batch(1, 0, 0.1)
            numbers.append(clock.epoch_number)
        clock.end_epoch()
        numbers.append(clock.epoch_number)

    assert numbers == [1, 1, 1, 1, 2, 2, 2]
    assert clock.epoch == 2
