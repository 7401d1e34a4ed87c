"""One rank fails: the others end soon after, and the first line is about the one that failed."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from unittest.mock import ANY

import pytest

from eventloop import hookimpl
from eventloop.cli import main
from eventloop.distributed.rank_store import bulletin, wait_until
from eventloop.distributed.watchdog import watched
from eventloop_testing import isolated_trainer

BOUND_S = 10
FAILING = '''
from pathlib import Path

from eventloop import hookimpl
from eventloop.events import EVENTS
from eventloop.plugin.declared_hooks import HOOKS
from eventloop_testing import tiny_task

KINDS = {"Exception": Exception, "KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}


class Fails:
    """Raises in one hook on one rank.

    Args:
        hook: which.
        kind: what.
        rank: where.
    """

    def __init__(self, *, hook: str, kind: str = "Exception", rank: int = 1) -> None:
        self.hook, self.kind, self.rank = hook, kind, rank

    def fail(self, state):
        if state.rank == self.rank:
            Path("raised").touch()
            raise KINDS[self.kind]("on purpose")


def failing(hook):
    def plain(self, state):
        if self.hook == hook:
            self.fail(state)
        elif self.hook in ("exception", "close") and hook == "batch_end":
            self.fail(state)
    return plain


for hook in EVENTS:
    setattr(Fails, hook, hookimpl(failing(hook)))


class Loud:
    """Listens to what is logged."""

    @hookimpl
    def log(self, state, numbers):
        pass


def task():
    made = tiny_task(callbacks=[Loud()])
    made.settings |= {"device": "cpu", "max_duration": "2ep"}
    return made
'''


@pytest.fixture
def fit_failing(clean, end_ranks):
    """Runs `eventloop fit` on two ranks, with a plugin that raises."""
    (clean / "failing.py").write_text(FAILING)

    def fit_failing(hook, kind, rank):
        options = ["--fails.hook", hook, "--fails.kind", kind, "--fails.rank", str(rank)]
        command = ["fit", "failing.py", "--no-plugins", "-p", "./failing.py:Fails", *options]
        ended = end_ranks(main, command)
        return ended.statuses, ended.err, ended.at - Path("raised").stat().st_mtime

    return fit_failing


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("hook", "kind", "rank"),
    [
        ("init", "SystemExit", 0),
        ("after_load", "KeyboardInterrupt", 1),
        ("fit_start", "Exception", 1),
        ("batch_start", "SystemExit", 1),
        ("after_backward", "KeyboardInterrupt", 0),
        ("log", "Exception", 0),
        ("eval_batch_end", "Exception", 1),
        ("fit_end", "SystemExit", 0),
        ("exception", "KeyboardInterrupt", 1),
        ("close", "Exception", 0),
    ],
)
def test_a_plugin_that_fails_on_one_rank_ends_all_and_is_named(hook, kind, rank, fit_failing):
    """Whatever it raises and wherever; nobody is left to wait in a collective."""
    statuses, err, took_s = fit_failing(hook, kind, rank)

    where = "batch_end" if hook in ("exception", "close") else hook
    first, *_ = err.splitlines()
    assert first.startswith(f"rank {rank}: {kind}: on purpose; raised by plugin fails")
    assert f" in {where}, epoch" in first
    assert err.count(first) == 1
    assert 0 not in statuses
    assert took_s < BOUND_S


def fit(callback, folder=".", **settings):
    """Fits on a rank as a script would; what it raises is the end of the script."""
    with isolated_trainer(Path(folder), callbacks=[callback], **settings) as trainer:
        trainer.fit()
    return 0


class OnRank:
    """Calls a function at the end of the second batch, on one rank or on all."""

    name = "on-rank"
    free_options = ("function",)

    def __init__(self, function, rank=None):
        self.function = function
        self.rank = rank

    @hookimpl
    def batch_end(self, state):
        if self.rank in (None, state.rank) and state.clock.batch == 2:
            self.function()


def wait_for_ever():
    threading.Event().wait()


def fail():
    raise LookupError("nothing found")


def test_a_script_s_rank_that_raises_ends_the_other_wherever_it_is(end_ranks, clean):
    """Python writes the traceback; who is ended says why. Not every rank waits in a collective."""

    def script():
        rank = int(os.environ["RANK"])
        return fit(OnRank(wait_for_ever if rank == 0 else fail))

    statuses, err, _ = end_ranks(script)

    assert statuses == [1, 70]
    assert err.count("LookupError: nothing found") >= 2
    assert err.count("\nrank 1: LookupError: nothing found; raised by plugin on-rank") == 1


def test_an_error_of_all_ranks_may_be_caught(end_ranks, clean):
    """They go on together, and the failure that all have left behind ends nobody."""
    failures = [LookupError("nothing found")]

    def fail_once():
        if failures:
            raise failures.pop()

    def script():
        with isolated_trainer(Path(), callbacks=[OnRank(fail_once)]) as trainer:
            try:
                trainer.fit()
            except LookupError:
                trainer.fit(until="9ba")
        return trainer.state.clock.batch

    assert end_ranks(script) == ([9, 9], "", ANY)


def test_an_error_of_all_ranks_is_reported_once(end_ranks, clean):
    """By the command; the others see to it that it is written."""
    (clean / "failing.py").write_text(FAILING.replace("state.rank == self.rank", "True"))
    plugin = ["--no-plugins", "-p", "./failing.py:Fails", "--fails.hook", "batch_start"]

    statuses, err, _ = end_ranks(main, ["fit", "failing.py", *plugin])

    assert statuses == [1, 1]
    assert err.count("Exception: on purpose; raised by") == 1
    assert err.count("Traceback") == 1


@pytest.mark.nightly
def test_a_rank_that_goes_on_alone_leaves_the_others_to_end(end_ranks, clean):
    """Its exception was caught, but they wait for it."""

    def script():
        try:
            return fit(OnRank(wait_for_ever if os.environ["RANK"] == "0" else fail))
        except LookupError:
            return 5

    statuses, err, _ = end_ranks(script)

    assert statuses == [1, 5]
    assert err.startswith("rank 1: LookupError: nothing found; raised by plugin on-rank")


def test_what_the_end_of_a_rank_causes_names_it(end_ranks, clean):
    """A script's traceback of a broken connection says nothing else of the reason."""
    statuses, err, _ = end_ranks(lambda: fit(OnRank(fail, rank=1)))

    assert statuses == [70, 70]
    assert "first failure: rank 1: LookupError: nothing found; raised by plugin on-rank" in err


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_other(end_ranks, clean, rank):
    """Also one that isn't in a collective, which would have noticed."""

    def script():
        me = int(os.environ["RANK"])
        return fit(OnRank(lambda: os._exit(9) if me == rank else wait_for_ever()))

    statuses, err, _ = end_ranks(script)

    assert statuses == ([9, 1] if rank == 0 else [1, 9])
    assert re.match(rf"rank {rank}: its process \d+ ended without reporting an error\n", err)


@pytest.mark.parametrize(("leaves", "status"), [(True, 0), (False, 1)])
def test_a_rank_that_left_in_order_ends_nobody(end_ranks, monkeypatch, leaves, status):
    """Prediction takes as long as it takes on each; control: one that didn't leave does."""
    monkeypatch.setattr("eventloop.distributed.watchdog.POLL_S", 0.01)
    monkeypatch.setattr("eventloop.distributed.watchdog.GRACE_S", 0.01)

    def script():
        board = bulletin()
        with watched():
            if board.rank == 0:
                assert wait_until(lambda: board.member(1) is not None, 5)
                wait_until(lambda: False, 1)
            elif not leaves:
                os._exit(0)
        return 0

    statuses, err, _ = end_ranks(script)

    assert statuses == [status, 0]
    assert bool(err) != leaves


@pytest.mark.nightly
def test_ranks_end_when_the_store_is_lost(end_ranks, clean):
    """It goes with what started them; nobody else would end them."""

    def script():
        def wait():
            Path(f"waits-{os.environ['RANK']}").touch()
            wait_for_ever()

        return fit(OnRank(wait))

    waits = [clean / "waits-0", clean / "waits-1"]
    statuses, err, _ = end_ranks(script, store_until=lambda: all(one.exists() for one in waits))

    assert statuses == [1, 1]
    for rank in (0, 1):
        assert f"rank {rank}: the process that held the ranks' store is gone" in err


def test_a_failure_stays_what_it_is_where_the_store_is_lost(end_ranks, clean):
    """It may have been that of rank 0, which ended first; nothing can be told then, or watched."""

    def script():
        board = bulletin()
        try:
            with watched():
                Path(f"inside-{board.rank}").touch()
                assert wait_until(lambda: _is_lost(board), 60)
                raise LookupError
        except LookupError:
            with watched():
                return 5

    inside = [clean / "inside-0", clean / "inside-1"]
    ended = end_ranks(script, store_until=lambda: all(one.exists() for one in inside))

    assert ended.statuses == [5, 5]


def _is_lost(board):
    try:
        board.first_failure()
    except RuntimeError:
        return True
    return False
