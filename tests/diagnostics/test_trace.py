"""The trace: spans that nest, a file that viewers read, and a table that adds up."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import pytest

from eventloop import hookimpl
from eventloop.diagnostics.trace import Trace


class Sleeps:
    """Sleeps 5 ms a batch, and knows how long that took on a busy machine."""

    def __init__(self):
        self.slept_s = 0.0

    @hookimpl
    def batch_end(self):
        began = time.perf_counter()
        time.sleep(0.005)
        self.slept_s += time.perf_counter() - began


class Inside:
    """Takes 5 ms of each training of a batch."""

    @hookimpl
    def after_forward(self):
        time.sleep(0.005)


class Around:
    """Encloses the training of each batch."""

    @hookimpl(wrapper=True)
    def train_batch(self):
        return (yield)


class Traced(NamedTuple):
    """A trace, its table, the events of its file, and how long `Sleeps` slept."""

    trace: Trace
    rows: list
    events: list
    slept_s: float


@pytest.fixture
def traced(make_trainer, clean):
    """Runs 100 steps under a trace."""
    trace, sleeps = Trace(), Sleeps()
    trainer = make_trainer(
        algorithms=[Around()], callbacks=[sleeps, Inside()], max_duration="100ba", observers=[trace]
    )
    trainer.fit()
    rows = list(trace.rows())
    path = clean / "trace.json"
    trace.write(path)
    return Traced(trace, rows, json.loads(path.read_text())["traceEvents"], sleeps.slept_s)


def ns(event):
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def test_the_file_is_what_viewers_read(traced):
    """Complete events, in µs, each with its plugin and hook."""
    name, *events = traced.events

    assert name["ph"] == "M"
    assert {event["ph"] for event in events} == {"X"}
    assert set(events[0]) == {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"}
    called = [(event["args"]["plugin"], event["args"]["hook"]) for event in events]
    assert called.count(("sleeps", "batch_end")) == called.count(("around", "train_batch")) == 100


def test_spans_nest(traced):
    """A span that crosses the end of another can't be drawn."""
    open_until = []

    for event in traced.events[1:]:
        start, end = ns(event)
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or end <= open_until[-1]
        open_until.append(end)


def test_a_wrapper_encloses_what_it_wraps(traced):
    """From its first line to its last: the core's training of the batch lies inside."""
    spans = {}
    for event in traced.events[1:]:
        spans.setdefault((event["args"]["plugin"], event["args"]["hook"]), []).append(ns(event))

    pairs = zip(spans["around", "train_batch"], spans["core", "train_batch"], strict=True)

    assert all(outer[0] <= inner[0] and inner[1] <= outer[1] for outer, inner in pairs)


def test_the_table_finds_who_sleeps(traced):
    """5 ms a batch, within a tenth; the wrapper isn't charged for what it encloses."""
    table = {(row[0], row[1]): dict(zip(Trace.columns, row, strict=True)) for row in traced.rows}
    sleeps = table["sleeps", "batch_end"]
    own_ns = {(one.plugin, one.hook): one.own_ns for one in traced.trace.shares()}

    assert sleeps["calls"] == "100"
    assert float(sleeps["ms a batch"]) == pytest.approx(traced.slept_s * 1000 / 100, rel=0.1)
    assert float(sleeps["ms a batch"]) >= 5
    assert own_ns["around", "train_batch"] < own_ns["inside", "after_forward"]


def test_names_are_escaped(make_trainer, make_plugin, clean):
    """A name may hold whatever its author likes."""
    trace = Trace()
    name = 'quo"te\\ and\nline é'
    make_trainer(callbacks=[make_plugin(name, batch_end=lambda: None)], observers=[trace]).fit()

    trace.write(clean / "trace.json")

    content = json.loads((clean / "trace.json").read_text())
    assert name in {event.get("cat") for event in content["traceEvents"]}


def test_a_long_run_keeps_the_first_spans_and_counts_all(make_trainer):
    """A file that no viewer opens helps nobody, but the table stays right."""
    trace = Trace(max_spans=10)
    make_trainer(observers=[trace]).fit()

    calls = sum(one.calls for one in trace.shares())

    assert len(trace.spans) == 10
    assert trace.num_left_out == calls - 10 > 0


def test_a_hook_that_raises_has_its_span(make_trainer, make_plugin):
    """The last span before a failure is the one that is looked for."""
    trace = Trace()
    trainer = make_trainer(
        algorithms=[make_plugin("bad", batch_end=lambda: 1 / 0)], observers=[trace]
    )

    with pytest.raises(ZeroDivisionError):
        trainer.fit()

    assert ("bad", "batch_end") in {(span.plugin, span.hook) for span in trace.spans}


def test_what_takes_next_to_no_time_is_one_row(traced):
    """A long table hides whose time it is."""
    *named, last, outside = traced.rows

    assert "others, below 0.1 % each" in last[1]
    assert float(last[-1].rstrip("%")) >= 0
    assert all(float(row[-1].rstrip("%")) >= 0.1 for row in named)
    assert outside[1] == "outside of hooks"
