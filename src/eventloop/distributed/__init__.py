"""Several processes that train together: joined here, imported only where a run needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eventloop.config.value_sources import TOKEN_VARIABLE
from eventloop.distributed.process_ends import in_ranks

if TYPE_CHECKING:
    from eventloop.distributed.processes import Processes


def join_processes() -> Processes:
    """Joins the processes that torchrun's variables describe; raises EventloopError."""
    if not in_ranks():
        from eventloop.distributed.processes import Processes

        return Processes()
    from eventloop.distributed.data_parallel import join  # one process needs nothing of it

    return join()


def rank_variables(rank: int, world_size: int, port: int, token: str = "") -> dict[str, str]:
    """Returns what torchrun would set for a rank here, and the token of the run.

    Args:
        port: of the launcher's TCPStore.
        token: a secret of these ranks, by which they know each other's records in the store.
    """
    return {
        TOKEN_VARIABLE: token,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Runs a block on the first rank of each machine before the other ranks run it.

    For something that one rank prepares and all read, such as a download or a cache. Every rank
    must enter it; with one process it does nothing.
    """
    processes = join_processes()
    if processes.local_rank:
        processes.all_gather(None)
    yield
    if not processes.local_rank:
        processes.all_gather(None)
