"""The trace: spans that nest, a file that viewers read, and a table that adds up."""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import NamedTuple

import pytest

from eventloop import hookimpl
from eventloop_testing import isolated_trainer, run_ranks, tiny_batches, tiny_task
from eventloop_trace import Trace


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
    """A trace, the events of its file, what is printed, and how long `Sleeps` slept."""

    trace: Trace
    events: list
    out: str
    slept_s: float


def events_of(trace):
    return json.loads(trace.path.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Runs 100 steps under a trace."""
    trace, sleeps = Trace(), Sleeps()
    plugins = {"algorithms": [Around()], "callbacks": [sleeps, Inside(), trace]}
    folder = tmp_path_factory.mktemp("traced")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with isolated_trainer(folder, **plugins, max_duration="100ba") as trainer:
            trainer.fit()
            assert out.getvalue() == ""
    return Traced(trace, events_of(trace), out.getvalue(), sleeps.slept_s)


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
    shares = {(one.plugin, one.hook): one for one in traced.trace.spans.shares()}
    rows = [line.split() for line in traced.out.splitlines()]
    (sleeps,) = (row for row in rows if row[:2] == ["sleeps", "batch_end"])

    assert rows[0] == [
        "plugin",
        "hook",
        "calls",
        "ms",
        "a",
        "call",
        "ms",
        "a",
        "batch",
        "s",
        "share",
    ]
    assert sleeps[2] == "100"
    assert float(sleeps[4]) == pytest.approx(traced.slept_s * 1000 / 100, rel=0.1)
    assert float(sleeps[4]) >= 5
    assert shares["around", "train_batch"].own_ns < shares["inside", "after_forward"].own_ns


def test_the_table_is_followed_by_where_the_file_is(traced):
    """It is in the run's folder."""
    last = traced.out.splitlines()[-1]

    assert traced.trace.path.name == "trace.json"
    assert last == (
        f"trace: {len(traced.events) - 1} spans in {traced.trace.path}; "
        "open it in https://ui.perfetto.dev"
    )


def test_names_are_escaped(make_trainer, capsys):
    """A name may hold whatever its author likes."""
    trace = Trace()
    name = 'quo"te\\ and\nline é'
    around = Around()
    around.name = name
    with make_trainer(algorithms=[around], callbacks=[trace]) as trainer:
        trainer.fit()

    assert name in {event.get("cat") for event in events_of(trace)}
    assert name not in capsys.readouterr().out


def test_a_long_run_keeps_the_first_spans_and_counts_all(make_trainer, capsys):
    """A file that no viewer opens is of no use, but the table stays right."""
    trace = Trace(max_spans=10)
    with make_trainer(callbacks=[trace]) as trainer:
        trainer.fit()

    assert len(events_of(trace)) == 11
    more = trace.spans.num_left_out - 1  # its own `close`, which prints
    assert f"trace: {more} more are in the table, but not in the file\n" in capsys.readouterr().out


class Fails:
    """Raises in the first batch."""

    @hookimpl
    def batch_end(self):
        raise EOFError


def test_a_hook_that_raises_has_its_span(make_trainer):
    """The last span before a failure is the one that is looked for."""
    trace = Trace()

    with pytest.raises(EOFError):
        with make_trainer(callbacks=[Fails(), trace]) as trainer:
            trainer.fit()

    assert "fails batch_end" in [event["name"] for event in events_of(trace)]


def test_a_run_that_never_began_leaves_nothing(make_trainer, capsys):
    """A trainer that only evaluates, say."""
    trace = Trace()
    with make_trainer(callbacks=[trace]):
        pass

    assert trace.path is None
    assert capsys.readouterr().out == ""


def test_what_takes_next_to_no_time_is_one_row(traced):
    """A long table hides whose time it is."""
    *named, last, outside = traced.trace.spans.rows()

    assert "others, below 0.1 % each" in last[1]
    assert float(last[-1].rstrip("%")) >= 0
    assert all(float(row[-1].rstrip("%")) >= 0.1 for row in named)
    assert outside[1] == "outside of hooks"


def test_each_rank_has_its_file_and_rank_0_prints(tmp_path, capfd):
    """Ranks may take their time in other hooks."""

    def run(folder):
        task = tiny_task(train_dataloader=tiny_batches(6))
        with isolated_trainer(folder, task, callbacks=[Trace()]) as trainer:
            trainer.fit()

    run_ranks(run, tmp_path)

    names = sorted(one.name for one in tmp_path.rglob("trace*.json"))
    assert names == ["trace.json", "trace.rank1.json"]
    assert capfd.readouterr().out.count("trace: ") == 1


def test_it_may_be_resumed_without(make_trainer):
    """It watches; it has no state."""
    with make_trainer(
        callbacks=[Trace()], max_duration="3ba", checkpoint_interval="1ba"
    ) as trainer:
        trainer.fit()
    with make_trainer(max_duration="4ba", checkpoint_interval="1ba") as trainer:
        trainer.fit()

    assert trainer.state.clock.batch == 4


def test_a_file_without_spans_is_refused():
    """At the start, not at the end."""
    with pytest.raises(ValueError, match="1 or more"):
        Trace(max_spans=0)
