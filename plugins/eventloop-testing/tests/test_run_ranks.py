"""`run_ranks` says what a rank did that gave no result."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from eventloop.distributed.rank_store import wait_until
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


class Processes:
    """A data set whose samples are the processes that read them."""

    def __len__(self):
        return 4

    def __getitem__(self, idx):
        return os.getpid()


def started_workers(folder=None):
    """Returns the processes of two workers that are still there; with a folder, waits for ever."""
    batches = iter(DataLoader(Processes(), 1, num_workers=2))
    workers = {next(batches).item(), next(batches).item()}
    if folder is not None:
        (folder / f"{os.getpid()}").write_text(" ".join(map(str, workers)))
        waits_for_ever()
    started_workers.batches = batches  # or the workers would end now
    return os.getpid(), *workers


def fails_with_workers(folder):
    rank, *workers = started_workers()
    (folder / str(rank)).write_text(" ".join(map(str, workers)))
    raise EOFError


def runs(process):
    """Returns whether a process exists, and not as a zombie that nothing has waited for."""
    command = ["ps", "-o", "stat=", "-p", str(process)]
    return subprocess.run(command, capture_output=True).stdout.strip()[:1] not in (b"", b"Z")


def gone(process, within_s):
    """Returns whether a process ends; one that was killed takes a moment."""
    return wait_until(lambda: not runs(process), within_s)


def of_files(folder):
    return [int(one) for path in folder.iterdir() for one in (path.name, *path.read_text().split())]


def test_a_rank_has_loader_workers_which_end_with_it():
    """Whoever calls it again and again would gather processes."""
    found = run_ranks(started_workers)

    assert len({*found[0], *found[1]}) == 6
    assert all(gone(one, 2) for rank in found for one in rank)


def test_workers_of_ranks_that_fail_end_with_them(tmp_path):
    """As soon as one has raised, all are killed."""
    with pytest.raises(RankError, match="EOFError"):
        run_ranks(fails_with_workers, tmp_path)

    assert of_files(tmp_path)
    assert all(gone(one, 2) for one in of_files(tmp_path))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does it on Linux alone")
def test_ranks_end_with_a_caller_that_is_killed(tmp_path):
    """A test that took too long is killed, and its ranks mustn't stay; workers look each 5 s."""
    if not (caller := os.fork()):
        try:
            run_ranks(started_workers, tmp_path)
        finally:
            os._exit(1)
    try:
        assert wait_until(lambda: len(of_files(tmp_path)) == 6, 60)
    finally:
        os.kill(caller, signal.SIGKILL)
        os.waitpid(caller, 0)

    processes = of_files(tmp_path)
    assert all(gone(one, 20) for one in processes)


def test_ranks_are_started_before_there_is_a_store(monkeypatch):
    """Its thread looks up names; a fork meanwhile would inherit the resolver's lock, for ever."""
    make_store, num_started = ranks.loopback_store, []

    def counted(*args, **kwargs):
        num_started.append(len(multiprocessing.active_children()))
        return make_store(*args, **kwargs)

    monkeypatch.setattr(ranks, "loopback_store", counted)

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
