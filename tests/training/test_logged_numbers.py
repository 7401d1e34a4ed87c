"""Logged numbers: kept where they are, delivered in order with their moment."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from eventloop.clock import Clock, Time
from eventloop.training.logged_numbers import Numbers


def delivered_by(deliver, clock: Clock) -> list:
    """Returns what comes to loggers, rows of texts as well, each with its moment."""
    rows = []

    def keep(state, row, at):
        rows.append((at, row))

    deliver(SimpleNamespace(clock=clock), SimpleNamespace(log=keep, log_text=keep))
    return rows


def run(numbers: Numbers, num_batches: int, value=float) -> list:
    """Logs a number a batch; gives what was delivered at each batch."""
    clock, delivered = Clock(), []
    for idx in range(num_batches):
        clock.end_batch(samples=4, tokens=0, seconds=0.1)
        numbers.record("n", value(idx))
        delivered.append([(at.batch, row["n"]) for at, row in delivered_by(numbers.deliver, clock)])
    delivered.append([(at.batch, row["n"]) for at, row in delivered_by(numbers.deliver_all, clock)])
    return delivered


@pytest.mark.parametrize("value", [float, lambda idx: torch.tensor(float(idx))])
def test_numbers_are_delivered_at_the_interval_and_at_the_end(value):
    """Each once, in order, with the batch that it belongs to."""
    assert run(Numbers(Time("2ba")), 5, value) == [
        [],
        [(1, 0.0), (2, 1.0)],
        [],
        [(3, 2.0), (4, 3.0)],
        [],
        [(5, 4.0)],
    ]


def test_a_row_holds_numbers_of_any_kind_by_name():
    """Host and device, integers, halves, one-entry tensors: a copy for each dtype."""
    numbers, clock = Numbers(Time("1ba")), Clock()
    row = {
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "int": torch.tensor(7),
        "row": torch.tensor([1.5]),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "host": 3,
        "bool": torch.tensor(True),
    }
    for name, value in row.items():
        numbers.record(name, value)

    ((at, delivered),) = delivered_by(numbers.deliver_all, clock)

    assert at == clock.moment()
    assert delivered == {"half": 0.5, "int": 7, "row": 1.5, "double": 0.1, "host": 3, "bool": True}
    assert list(delivered) == list(row)


KINDS = [1.0, 2, torch.tensor(3.0), torch.tensor(4)]


@pytest.mark.parametrize("earlier", KINDS)
@pytest.mark.parametrize("later", KINDS)
def test_a_later_number_of_one_moment_replaces_the_earlier(earlier, later):
    """A name has one value a moment, wherever the one before was."""
    numbers, clock = Numbers(Time("1ba")), Clock()

    for value in (earlier, torch.tensor(5.0), later):
        numbers.record("other", torch.tensor(6.0))
        numbers.record("n", value)

    expected = {"other": 6.0, "n": float(later)}
    assert [row for _, row in delivered_by(numbers.deliver_all, clock)] == [expected]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
@pytest.mark.parametrize("name", ["lr/main", "train/loss"])
def test_what_every_batch_has_replaces_what_a_plugin_logged(rate, name):
    """Whoever takes such a name mustn't end the run."""
    numbers, clock = Numbers(Time("1ba")), Clock()
    params = [torch.zeros(1, requires_grad=True)]

    numbers.record(name, torch.tensor(9.0))
    numbers.record_batch(torch.tensor(2.0), {"main": torch.optim.SGD(params, lr=rate)})

    assert [row for _, row in delivered_by(numbers.deliver_all, clock)] == [
        {"train/loss": 2.0, "lr/main": 0.1}
    ]


def test_a_moment_that_will_not_come_leaves_nothing():
    """Half a batch's numbers would stand at the one before."""
    numbers, clock = Numbers(Time("3ba")), Clock()
    clock.end_batch(samples=4, tokens=0, seconds=0.1)
    numbers.record("n", torch.tensor(1.0))
    assert delivered_by(numbers.deliver, clock) == []

    numbers.record("n", torch.tensor(2.0))
    numbers.forget()

    assert [row for _, row in delivered_by(numbers.deliver_all, clock)] == [{"n": 1.0}]


def test_parts_of_a_batch_that_failed_do_not_join_the_next():
    """Its mean would be that of two batches."""
    numbers, clock = Numbers(Time("1ba")), Clock()
    numbers.weights = (1.0, 1.0, 1.0)
    for values in ([100.0, 200.0, 300.0], [1.0, 2.0]):
        numbers.forget()
        for idx, value in enumerate(values):
            numbers.record_part("n", value, idx)

    numbers.record_batch(None, {})

    assert [row for _, row in delivered_by(numbers.deliver_all, clock)] == [{"n": 1.5}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_value_is_lost(value):
    """A loss that isn't finite is what people look for."""
    numbers, clock = Numbers(Time("1ba")), Clock()

    numbers.record("n", torch.tensor(value))

    ((_, row),) = delivered_by(numbers.deliver_all, clock)
    assert repr(row["n"]) == repr(value)


def test_without_numbers_there_is_no_row():
    """Loggers aren't told of nothing."""
    numbers, clock = Numbers(Time("1ba")), Clock()

    assert delivered_by(numbers.deliver_all, clock) == []


def test_where_nobody_listens_nothing_is_kept():
    """A run without loggers must not hold every loss for ever."""
    numbers = Numbers(Time("2ba"))
    numbers.is_heard = False

    assert run(numbers, 5) == [[], [], [], [], [], []]


class Ranks:
    """Stands for the other ranks: says what is asked of them, and adds 100 to a number."""

    def __init__(self):
        self.asked: list[str] = []

    def __call__(self, rows, reductions):
        self.asked.append("begun")

        def reduce():
            self.asked.append("awaited")
            for row in rows:
                row["n"] = torch.tensor(row["n"] + 100.0)
            return [(row, "n") for row in rows]

        return reduce


def test_over_ranks_numbers_are_handed_on_a_batch_after_their_names_were_sent():
    """No batch waits for the comparison, which goes on beside the next one."""
    ranks = Ranks()
    numbers, asked = Numbers(Time("2ba"), ranks), []
    clock = Clock()
    for idx in range(4):
        clock.end_batch(samples=4, tokens=0, seconds=0.1)
        numbers.record("n", float(idx))
        rows = delivered_by(numbers.deliver, clock)
        asked.append(([row["n"] for _, row in rows], ranks.asked[:]))
        ranks.asked.clear()

    assert asked == [([], []), ([], ["begun"]), ([100.0, 101.0], ["awaited"]), ([], ["begun"])]
    numbers.record("n", 4.0)
    late = [row["n"] for _, row in delivered_by(numbers.deliver_all, clock)]
    assert late == [102.0, 103.0, 104.0]
    assert ranks.asked == ["awaited", "begun", "awaited"]


def test_a_rank_that_fails_does_not_wait_for_the_others():
    """They may be gone; what it has logged since they were last asked is its own."""
    ranks = Ranks()
    numbers, clock = Numbers(Time("1ba"), ranks), Clock()
    clock.end_batch(samples=4, tokens=0, seconds=0.1)
    numbers.record("n", 1.0)
    assert delivered_by(numbers.deliver, clock) == []
    numbers.record("n", 2.0)

    rows = delivered_by(partial(numbers.deliver_all, alone=True), clock)

    assert [row["n"] for _, row in rows] == [1.0, 2.0]
    assert ranks.asked == ["begun"]


def test_where_nobody_listens_ranks_compare_nothing():
    """Each comparison costs a collective; one rank that logs nothing still takes part, if somebody listens."""
    ranks = Ranks()
    numbers, clock = Numbers(Time("1ba"), ranks), Clock()
    clock.end_batch(samples=4, tokens=0, seconds=0.1)
    delivered_by(numbers.deliver, clock)
    assert ranks.asked == ["begun"]

    numbers.is_heard = False
    for deliver in (numbers.deliver_all, numbers.deliver, numbers.deliver_all):
        clock.end_batch(samples=4, tokens=0, seconds=0.1)
        delivered_by(deliver, clock)

    assert ranks.asked == ["begun", "awaited"]
