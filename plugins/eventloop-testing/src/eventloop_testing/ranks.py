"""Several ranks on this machine: real processes under gloo, for tests."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from eventloop.distributed import rank_variables
from eventloop.distributed.checkpoint_crew import CrewOfRanks
from eventloop.distributed.loopback import loopback_store
from eventloop.distributed.process_ends import end_with_launcher, kill_group

TIMEOUT_S = 120.0


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = TIMEOUT_S,
    **kwargs: Any,
) -> list[Any]:
    """Calls a function in several processes that form a process group, on the CPU.

    On Linux the processes are forks of this process, so any callable works; elsewhere the function has
    to be defined at the top level of a module. A rank may start processes, such as workers of a data
    loader. They and the ranks end with this call, and on Linux with this process, even if it is killed.

    Args:
        args, kwargs: arguments of the function.

    Returns:
        The function's results, in order of rank; tensors and anything else that can be pickled.

    Raises:
        RankError: a rank raised or died; the message has its number and traceback.
        TimeoutError: the ranks took longer than `timeout_s`; the message has each rank's stack.
    """
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = []
    with tempfile.TemporaryDirectory() as stacks:
        gc.freeze()  # a library's fork handler may trigger a collection before `_run` is called
        faulthandler.cancel_dump_traceback_later()  # a fork would wait for pytest's thread
        try:
            for rank in range(world_size):
                job = (Path(stacks, str(rank)), timeout_s, function, args, kwargs)
                ranks.append(_started(context, rank, job))
            # After the forks: a fork made while the store's thread holds a lock, for example to look
            # up a name, inherits the lock and waits for it forever.
            store = loopback_store()
            for rank, (_, ours) in enumerate(ranks):
                with suppress(BrokenPipeError):  # the rank died; `_results` reports it
                    ours.send(rank_variables(rank, world_size, store.port))
            return _results(ranks, time.monotonic() + timeout_s + 1, Path(stacks))
        finally:
            gc.unfreeze()
            for process, ours in ranks:
                process.kill()
                kill_group(process.pid)  # its workers, before the process id can be reused
                process.join()
                ours.close()


class RankError(Exception):
    """A rank raised or died."""


def _started(context: Any, rank: int, job: tuple[Any, ...]) -> tuple[Any, Connection]:
    """Starts the process of a rank, which waits for its variables on the pipe."""
    ours, theirs = context.Pipe()
    # Not a daemon: daemons mustn't start processes.
    process = context.Process(target=_run, args=(theirs, *job), name=f"rank {rank}", daemon=False)
    process.start()
    theirs.close()
    return process, ours


def _run(
    pipe: Connection,
    stack: Path,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.setsid()  # so that its workers are a group
    end_with_launcher()
    # A fork inherits garbage whose threads don't exist in it: collecting it would wait for them, and
    # abort this process.
    gc.freeze()
    faulthandler.dump_traceback_later(timeout_s, file=stack.open("w"))
    os.environ |= pipe.recv()
    torch.set_num_threads(1)
    try:
        result = (True, function(*args, **kwargs))
    except BaseException:  # noqa: BLE001  the caller raises it
        result = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()
    # A regular exit of a failed rank would wait for the other ranks in its process groups.
    os._exit(0)


def _results(ranks: list[tuple[Any, Connection]], deadline: float, stacks: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {ours: rank for rank, (_, ours) in enumerate(ranks) if rank not in results}
        ready = wait(list(waiting), deadline - time.monotonic())
        if not ready:
            late = waiting.values()
            doing = "\n".join(f"rank {rank}: {(stacks / str(rank)).read_text()}" for rank in late)
            raise TimeoutError(f"no result from rank {', '.join(map(str, late))}\n{doing}")
        for ours, rank in waiting.items():
            if ours not in ready:
                continue
            try:
                has_result, value = pickle.loads(ours.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise RankError(f"rank {rank} died") from None
            if not has_result:
                raise RankError(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def crew_of_threads(world_size: int) -> list[CrewOfRanks]:
    """Returns a crew for each of several threads, which then save a checkpoint as ranks do.

    Waiting for a thread that has ended raises `threading.BrokenBarrierError`.
    """
    values: list[Any] = [None] * world_size
    barrier = threading.Barrier(world_size, timeout=30)
    return [_Thread(rank, values, barrier) for rank in range(world_size)]


class _Thread(CrewOfRanks):
    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = len(values)
        self._values = values
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any]:
        values = self._exchanged(value)
        return [] if self.rank else values

    def first(self, value: Any) -> Any:
        return self._exchanged(value)[0]

    def _exchanged(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = [*self._values]
        self._barrier.wait()
        return values
