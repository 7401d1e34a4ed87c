"""Ranks that are started again meet those that were started with them, in a store that is full of others."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from eventloop.distributed.rank_store import agree
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
