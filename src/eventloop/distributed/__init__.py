"""Training with several processes: joining them, with lazy imports for runs of a single process."""

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
    from eventloop.distributed.data_parallel import join  # slow to import

    return join()


def rank_variables(rank: int, world_size: int, port: int, token: str = "") -> dict[str, str]:
    """Returns the environment variables of a rank on this machine: torchrun's, and the run's token.

    Args:
        port: the port of the launcher's TCPStore.
        token: a secret that seals the ranks' records in the store; "" for none.
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

    For files that one rank prepares and all ranks read, such as a download or a cache. Every rank must
    enter the block; with a single process this does nothing.
    """
    processes = join_processes()
    if processes.local_rank:
        processes.all_gather(None)
    yield
    if not processes.local_rank:
        processes.all_gather(None)
