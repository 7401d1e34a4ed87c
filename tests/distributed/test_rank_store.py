"""Ranks that are started again meet those that were started with them, in a store that is full of others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from eventloop.distributed.process_ends import is_alive, kill_rank
from eventloop.distributed.rank_store import Bulletin, Failure, agree
from eventloop.distributed.sealed_records import SealedRecords
from eventloop.distributed.watchdog import watched_command
from eventloop_testing import isolated_trainer, run_ranks, tiny_task


def names(store, world_size):
    """Returns the name that each rank of an attempt gets; rank 0 comes last."""
    with ThreadPoolExecutor(world_size) as ranks:
        order = reversed(range(world_size))
        return {*ranks.map(lambda rank: agree(store, rank, world_size, 10.0), order)}


def test_ranks_of_one_attempt_agree_and_those_of_two_do_not():
    """However many ranks there were before, and however many times."""
    store = HashStore()

    found = [names(store, world_size) for world_size in (3, 2, 1, 3, 2)]

    assert [len(one) for one in found] == [1] * 5
    assert len(set.union(*found)) == 5


def test_an_attempt_that_never_began_holds_up_no_other():
    """Rank 2 was lost before it started; the others of that attempt had answered, or not."""
    store = HashStore()
    with ThreadPoolExecutor(2) as ranks:
        lost = [ranks.submit(agree, store, rank, 3, 0.5) for rank in (0, 1)]
        reasons = sorted(str(one.exception()).splitlines()[0] for one in lost)

    assert reasons == [
        "2 of 3 ranks have started, and no more in 0.5 s",
        "rank 1 waits for rank 0 to start, and no more in 0.5 s",
    ]
    assert len(names(store, 3)) == 1


def fit_as(folder, counts, **variables):
    """Trains as a rank that torchrun has started, on machines that count restarts by themselves."""
    rank = int(os.environ["RANK"])
    os.environ |= {"TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": str(counts[rank])}
    os.environ |= {"EVENTLOOP_TIMEOUT_S": "20", **variables}
    with isolated_trainer(folder / str(rank), tiny_task(), max_duration="2ba") as trainer:
        trainer.fit()
        return trainer.state.clock.batch


def test_machines_that_count_restarts_differently_train_together(tmp_path):
    """One that comes later has restarted less often than those that waited for it."""
    assert run_ranks(fit_as, tmp_path, (1, 0), timeout_s=60) == [2, 2]


def end(folder, counts, port):
    """Trains, and ends as a command does: rank 0's store is there until all have seen the end."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    with watched_command():
        return fit_as(folder, counts)


def test_rank_0_holds_the_store_where_torchrun_leaves_it_to_it(tmp_path):
    """TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which no machine can come later (torch 2.13)."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    assert run_ranks(end, tmp_path, (0, 1), port, timeout_s=60) == [2, 2]


def board_of(store, rank, token=""):
    return Bulletin(store, rank, 2, "0", token)


ESCAPES = "\x1b[31mrank 1: a text of somebody else\x1b[0m"


@pytest.mark.parametrize("token", ["", "a secret"])
def test_a_failure_of_a_rank_is_safe_to_print(token):
    """Under torchrun there is no token, and a plugin's message may hold anything."""
    store = HashStore()
    board_of(store, 1, token).post(Failure(1, ESCAPES, f"{ESCAPES}\n  fix\x07\n", 1, 1))

    failure = board_of(store, 0, token).first_failure()

    assert failure is not None
    assert "\x1b" not in failure.report
    assert "\x07" not in failure.report
    assert failure.details.endswith("fix\\x07\n")


FORGED = [
    [1, "a line", "", 0, 1],
    [1, "a line", "", -9, 1],
    [1, "a line", "", 256, 1],
    [7, "a line", "", 1, 1],
    [-1, "a line", "", 1, 1],
    [1, "a line", "", 1, -1],
    [1, ["a line"], "", 1, 1],
    [True, "a line", "", 1, 1],
    [1, "a line", "", 1],
    {"rank": 1, "line": "a line"},
    "a line",
]


@pytest.mark.parametrize("values", FORGED)
def test_a_failure_that_no_rank_can_have_posted_is_none(values):
    """Its status becomes that of the command, and its rank an index."""
    store = HashStore()
    SealedRecords(store, "").write("eventloop/0/0/failure", values)
    board = board_of(store, 0)

    assert board.first_failure() is None
    own = Failure(0, "rank 0: the culprit", "", 1, 0)
    assert board.post(own) == own
    assert board_of(store, 1).first_failure() == own


@pytest.mark.parametrize(
    "values", [["here", 0, True, 1, "", 0], ["here", -1, True, 1, "", 0], [1, 2], None, "x"]
)
def test_a_record_of_a_rank_that_none_can_have_written_is_none(values):
    """Process 0 and negative ones are groups, to which a signal would go."""
    store = HashStore()
    SealedRecords(store, "").write("eventloop/0/member/1", values)

    assert board_of(store, 0).member(1) is None


def test_a_stranger_can_not_post_for_a_rank_nor_end_the_run():
    """Each record has the seal of the run's token."""
    store = HashStore()
    stranger, board = board_of(store, 1, "a guess"), board_of(store, 0, "a secret")
    stranger.enter()
    stranger.post(Failure(1, ESCAPES, "", 1, 1))
    stranger.claim()
    stranger.set_reported()
    stranger.finish()
    board.finish()

    assert board.member(1) is None
    assert board.first_failure() is None
    assert board.claim()
    assert not board.is_reported()
    assert not board.all_are_done()


def test_all_are_done_when_the_last_one_is():
    """Rank 0 tells the others, so that each reads one record."""
    store = HashStore()
    boards = [board_of(store, rank, "a secret") for rank in range(2)]

    boards[0].finish()
    before = [board.all_are_done() for board in boards]
    boards[1].finish()

    assert before == [False, False]
    assert [board.all_are_done() for board in boards] == [True, True]


def sleeper(**variables):
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **variables})


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone shows the variables of a process")
def test_a_process_that_is_no_rank_of_the_run_is_not_killed(monkeypatch):
    """The store names it, and whoever reaches its port may have written it there."""
    of_run = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in of_run.items():
        monkeypatch.setenv(name, value)
    rank = sleeper(RANK="1")
    others = [sleeper(RANK="0"), sleeper(RANK="1", MASTER_PORT="1235")]
    try:
        for process in (*others, rank):
            kill_rank(process.pid, 1)

        assert rank.wait(60) == -9
        assert all(process.poll() is None for process in others)
        kill_rank(os.getppid(), 1)
        assert is_alive(os.getppid())
    finally:
        for process in (*others, rank):
            process.kill()
            process.wait()
