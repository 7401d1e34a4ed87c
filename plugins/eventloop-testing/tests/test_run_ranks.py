"""`run_ranks` says what a rank did that gave no result."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from eventloop_testing import ranks, run_ranks
from eventloop_testing.ranks import RankError


def waits_for_ever():
    threading.Event().wait()


def test_a_rank_that_gives_no_result_in_time_is_shown_where_it_waits():
    """A timeout alone would leave one guessing which of many waits it was."""
    with pytest.raises(TimeoutError, match="no result from rank 1\n") as caught:
        run_ranks(lambda: os.environ["RANK"] == "0" or waits_for_ever(), timeout_s=1)

    assert "in waits_for_ever" in str(caught.value)


def test_a_rank_that_dies_is_named():
    """Nobody waits for what never comes."""
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(lambda: os.environ["RANK"] == "0" or os._exit(1))


def test_ranks_are_started_before_there_is_a_store(monkeypatch):
    """Its thread looks up names; a fork meanwhile would inherit the resolver's lock, for ever."""
    make_store, num_started = ranks.TCPStore, []

    def counted(*args, **kwargs):
        num_started.append(len(multiprocessing.active_children()))
        return make_store(*args, **kwargs)

    monkeypatch.setattr(ranks, "TCPStore", counted)

    assert run_ranks(lambda: int(os.environ["RANK"]), world_size=3) == [0, 1, 2]
    assert num_started == [3]


def test_a_timer_of_pytest_s_faulthandler_does_not_stop_the_ranks():
    """The lock of its thread, which a fork doesn't have, would be waited for without end."""
    faulthandler.dump_traceback_later(60)
    try:
        assert run_ranks(lambda: int(os.environ["RANK"]), timeout_s=20) == [0, 1]
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_garbage_of_the_caller_is_not_collected_in_a_rank():
    """A store holds a thread, which a fork doesn't have: to let it go there aborts the process."""
    gc.disable()
    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        garbage = SimpleNamespace(store=store)
        garbage.itself = garbage
        del garbage, store

        assert len(run_ranks(gc.collect)) == 2
    finally:
        gc.enable()


def test_garbage_is_not_collected_by_what_libraries_do_after_a_fork():
    """OpenTelemetry, for one, starts threads in a child before anything else runs there."""
    state = {"hook": gc.collect}
    os.register_at_fork(after_in_child=lambda: state["hook"]())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    garbage = SimpleNamespace(store=store)
    garbage.itself = garbage
    del garbage, store
    try:
        assert run_ranks(gc.isenabled) == [True, True]
    finally:
        state["hook"] = lambda: None
