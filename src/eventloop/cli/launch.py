"""`--nproc`: the command started once a rank, by torchrun's own launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence

from eventloop.cli.arguments import CommandOption
from eventloop.errors import UsageError, counted
from eventloop.plugin.records import fold

OPTION = CommandOption("nproc", "N", "train in N processes on this machine, started by torchrun")


def launch(command: str, argv: Sequence[str], nproc: str) -> int:
    """Runs a command in several processes, and waits for them.

    Args:
        argv: what follows the command, `--nproc` included.
        nproc: the value of that option.

    Returns:
        The exit status of the first process that failed; 128 and the signal that ended it.

    Raises:
        UsageError: `nproc` is no number of processes, or torchrun has started this one.
    """
    num = _number(nproc)
    if "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"--nproc {nproc}, but torchrun has started this process as one of "
            f"{os.environ.get('WORLD_SIZE', 'several')} already",
            fix="leave --nproc out, or start it without torchrun",
        )
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if num > num_cores:
        sys.stderr.write(f"warning: {num} processes share {counted(num_cores, 'core')}\n")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // num)))
    return _run(num, ["-m", "eventloop", command, *without_nproc(argv)])


def without_nproc(argv: Sequence[str]) -> list[str]:
    """Leaves `--nproc N` out of a command line."""
    kept: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--") and fold(name[2:]) == OPTION.name:
            if not equals:
                next(words)
        else:
            kept.append(word)
    return kept


def _number(nproc: str) -> int:
    if not (nproc.isascii() and nproc.isdigit() and int(nproc) > 0):
        raise UsageError(
            f"--nproc takes a number of processes, not {nproc!r}", fix="write `--nproc 2`"
        )
    return int(nproc)


def _run(num: int, arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What went wrong is said once, by the rank that knows.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        others = "; the others were stopped" if num > 1 else ""
        sys.stderr.write(f"rank {rank} {how} (process {failure.pid}){others}\n")
        return status if status >= 0 else 128 - status
    return 0
