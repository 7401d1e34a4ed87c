"""Processes that are really killed, at random moments: the run ends with the bytes of one that wasn't."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store
from eventloop.distributed import rank_variables
from eventloop.distributed.rank_store import wait_until
from eventloop_testing.case import isolated_trainer

TASK = Path(__file__).parents[2] / "benchmarks" / "soak_task.py"
END_S = 60.0
LAUNCHER_S = 4.5  # until a launcher ends those that nobody has told of a failure yet


@pytest.fixture(scope="module")
def soak_task():
    """The reference of the long test; what forks need is imported once, here."""
    import torch._dynamo  # noqa: F401  DDP wants it, and each rank would take seconds for it

    return runpy.run_path(str(TASK))["task"]


class Run:
    """A run whose processes are forks of this one, which cost no imports.

    Args:
        folder: of the run.
        task: makes what is trained.
        world_size: how many processes train.
    """

    def __init__(self, folder, task, world_size):
        self.folder = folder
        self.task = task
        self.world_size = world_size
        self.store = Store(folder / "run" / "checkpoints")
        self.log = folder / "run" / "metrics.jsonl"
        self.errors = folder / "stderr.txt"

    def start(self):
        """Starts it, or goes on with it; gives the ranks' processes and what holds their store."""
        self.folder.mkdir(exist_ok=True)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return [self.fork(rank, store.port) for rank in range(self.world_size)], store

    def fork(self, rank, port):
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            if self.world_size > 1:
                os.environ |= rank_variables(rank, self.world_size, port)
            sys.stderr = os.fdopen(
                os.open(self.errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "w"
            )
            os.dup2(sys.stderr.fileno(), 2)
            self.train()
            status = 0
        except SystemExit as ended:
            print(ended, file=sys.stderr)
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def train(self):
        # A look at all that pytest has imported would take longer than the training.
        given = {"max_duration": "6ep", "checkpoint_interval": "7ba", "gc_interval": None}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "nothing to train")  # it was killed at its end
            with isolated_trainer(self.folder, self.task(), **given) as trainer:
                trainer.fit()

    def finish(self):
        """Goes on until it is done."""
        pids, _store = self.start()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert not any(statuses), self.errors.read_text()

    def num_bytes_logged(self):
        return self.log.stat().st_size if self.log.exists() else 0

    def result(self):
        """Returns what the newest checkpoint holds, and the log."""
        path, refused = self.store.latest()
        assert not refused
        rows = map(json.loads, self.log.read_text().splitlines())
        parts = read_checkpoint(path).parts
        return parts, {(row["batch"], row["name"]): row["value"] for row in rows}


def kill(run, draw, moment):
    """Starts a run and kills one of its processes, or all; the others end with it."""
    before = run.num_bytes_logged()
    pids, _store = run.start()
    if draw.random() < 0.7:  # else while it starts
        assert wait_until(lambda: run.num_bytes_logged() > before or gone(pids[0]), END_S)
    wait_until(lambda: False, draw.uniform(0, moment))
    victims = draw.choice([pids, *([pid] for pid in pids)])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)), LAUNCHER_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def gone(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "num_kills"), [(1, 10), (2, 5)])
def test_killed_at_random_moments_it_ends_the_same(tmp_path, soak_task, world_size, num_kills):
    """Promise A: whatever the moment, whoever is killed."""
    whole = Run(tmp_path / "whole", soak_task, world_size)
    killed = Run(tmp_path / "killed", soak_task, world_size)
    draw = random.Random(0)
    whole.finish()
    for _ in range(num_kills):
        kill(killed, draw, 0.15)

    killed.finish()

    (expected, numbers), (actual, others) = whole.result(), killed.result()
    assert [str(one) for one in differences(expected, actual)] == []
    assert others == numbers


def terminate(run, draw):
    """Starts a run and asks one of its processes to end, or all; gives how, and what they wrote."""
    before = run.num_bytes_logged()
    run.errors.unlink(missing_ok=True)
    pids, _store = run.start()
    assert wait_until(lambda: run.num_bytes_logged() > before or gone(pids[0]), END_S)
    wait_until(lambda: False, draw.uniform(0, 0.1))
    for pid in draw.choice([pids, *([pid] for pid in pids)]):
        os.kill(pid, signal.SIGTERM)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses, run.errors.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("world_size", "num_signals"), [(1, 6), (2, 4)])
def test_terminated_at_random_moments_it_ends_the_same(
    tmp_path, soak_task, world_size, num_signals
):
    """All end at one batch, which is saved, whoever was asked; and the run goes on from there."""
    whole = Run(tmp_path / "whole", soak_task, world_size)
    asked = Run(tmp_path / "asked", soak_task, world_size)
    draw = random.Random(0)
    whole.finish()
    for _ in range(num_signals):
        statuses, written = terminate(asked, draw)
        newest, _ = asked.store.latest()
        if not any(statuses):  # complete, on a fast machine
            break

        assert statuses == world_size * [143], written
        assert written == world_size * f"terminated after batch {int(newest.name[2:])}\n"

    asked.finish()

    (expected, numbers), (actual, others) = whole.result(), asked.result()
    assert [str(one) for one in differences(expected, actual)] == []
    assert others == numbers
