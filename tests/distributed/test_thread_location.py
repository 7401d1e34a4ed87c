"""`thread_location`: whether a rank waits for others, as the watchdog asks."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eventloop.distributed import join_processes
from eventloop.distributed.thread_location import line_of_thread, wait_for, waits_in_collective
from eventloop_testing import run_ranks

CALLS = {
    "all_gather": lambda ranks: ranks.all_gather({"a": 1}),
    "are_same": lambda ranks: ranks.are_same([1, 2]),
    "count_true": lambda ranks: ranks.count_true(True),
    "mean": lambda ranks: ranks.mean(torch.ones(())),
    "gather": lambda ranks: ranks.gather(1),
    "barrier": lambda ranks: dist.barrier(),
}


def until(is_so):
    """Waits until something is so; returns whether it was within half a minute."""
    end = time.monotonic() + 30
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def is_seen(folder, name):
    """Lets rank 1 join a call of rank 0 when that one was seen to wait; returns whether it was."""
    ranks, joins = join_processes(), folder / name
    if ranks.rank == 1:
        until(joins.exists)
        CALLS[name](ranks)
        return True
    main, seen = threading.get_ident(), []

    def look():
        seen.append(until(lambda: waits_in_collective(main)))
        joins.touch()

    thread = threading.Thread(target=look)
    thread.start()
    CALLS[name](ranks)
    thread.join()
    return seen == [True]


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_waits_for_another_is_seen(name, tmp_path):
    """In what torch does, and in what eventloop waits for itself, a collective begun before."""
    assert run_ranks(is_seen, tmp_path, name) == [True, True]


def test_a_wait_is_where_it_was_called():
    """Not in the function that all waits share."""
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=lambda: wait_for(SimpleNamespace(wait=lock.acquire)))
    thread.start()

    assert until(lambda: waits_in_collective(thread.ident))
    assert "test_thread_location.py" in line_of_thread(thread.ident)

    lock.release()
    thread.join()


def test_another_wait_is_none_of_a_collective():
    """A lock of the task's own, say."""
    lock, has_begun = threading.Lock(), threading.Event()
    lock.acquire()

    def waits():
        has_begun.set()
        lock.acquire()

    thread = threading.Thread(target=waits)
    thread.start()
    has_begun.wait()
    time.sleep(0.1)

    assert not waits_in_collective(thread.ident)

    lock.release()
    thread.join()
