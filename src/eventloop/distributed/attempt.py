"""Names the attempt of a run, so that ranks connect only to ranks started with them.

torchrun keeps its store over a restart, with all keys of earlier attempts. Its restart count
doesn't identify an attempt: each machine counts separately, a machine that joins later starts at
0, and a restart because a machine joined isn't counted (torch 2.13). So rank 0 names each attempt,
and continues when every other rank has answered.
"""

from __future__ import annotations

import functools
import os
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, not in __all__

from eventloop.config.layers import TIMEOUT_VARIABLE
from eventloop.distributed.exit import timeout_s
from eventloop.errors import EventloopError

_NAME = "eventloop/attempt"
_POLL_S = 0.02


@functools.cache
def attempt() -> str:
    """Returns the name of this attempt, the same on all its ranks; collective under torchrun.

    Raises:
        EventloopError: a rank hasn't started in time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or _is_held_by_a_rank():
        return "0"  # no launcher but torchrun starts ranks again; rank 0's store ends with it
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return agree(connect(timedelta(seconds=timeout_s())), rank, world_size, timeout_s())


def connect(patience: timedelta) -> TCPStore:
    """Connects to the store of these ranks, which torchrun or rank 0 hosts.

    Args:
        patience: the timeout of each request.

    Raises:
        KeyError, ValueError, RuntimeError: the variables are missing, or there is no store.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not _is_held_by_a_rank():
        return TCPStore(host, port, is_master=False, timeout=patience)
    holds = os.environ["RANK"] == "0"
    # torch's own rendezvous finds the store of this process, and shares it.
    seconds = timedelta(seconds=timeout_s())
    store = TCPStore(host, port, is_master=holds, multi_tenant=True, timeout=seconds)
    store.set_timeout(patience)
    return store


def _is_held_by_a_rank() -> bool:
    """Returns whether rank 0 hosts the store: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False"


def agree(store: Store, rank: int, world_size: int, seconds: float) -> str:
    """Returns a name for these ranks that earlier ranks in the same store don't have.

    Args:
        seconds: how long the ranks wait for each other.

    Raises:
        EventloopError: a rank hasn't answered in time.
    """
    end = time.monotonic() + seconds
    if rank == 0:
        name = f"eventloop/{os.urandom(8).hex()}"
        store.set(_NAME, name)
        while (num_here := 1 + store.add(f"{name}/num_answers", 0)) < world_size:
            _wait(end, seconds, f"{num_here} of {world_size} ranks have started")
        store.set(f"{name}/go", "")
        return name
    name = ""
    while not (name and store.check([f"{name}/go"])):
        _wait(end, seconds, f"rank {rank} waits for rank 0 to start")
        newest = store.get(_NAME).decode() if store.check([_NAME]) else ""
        # The name of an earlier attempt has been answered by that attempt's rank.
        if newest != name and store.add(f"{newest}/answer/{rank}", 1) == 1:
            store.add(f"{newest}/num_answers", 1)
            name = newest
    return name


def _wait(end: float, seconds: float, what: str) -> None:
    if time.monotonic() > end:
        raise EventloopError(
            f"{what}, and no more in {seconds:g} s",
            fix=f"see what the other ranks wrote, or set {TIMEOUT_VARIABLE} to more seconds",
        )
    time.sleep(_POLL_S)
