"""Machines that are lost and come back under torchrun: the run goes on, and no sample is lost or repeated.

A "machine" is an agent of torchrun on loopback, with one rank. The store in which agents meet is this
process's, so that any of them may be lost.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.utils.data import DistributedSampler

from eventloop.checkpoint.retention import UNDER_WAY
from eventloop.distributed.rank_store import wait_until

TASK = """
import json
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task, hookimpl

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
SAMPLES = TensorDataset(torch.cat([X, torch.arange(60.0)[:, None]], 1), X.argmax(1))


class Model(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs[:, :3])


class Records:
    name = "records"

    @hookimpl
    def batch_end(self, state):
        row = {
            "at": time.time(),
            "attempt": os.environ["MASTER_PORT"],
            "parent": os.getppid(),
            "rank": state.rank,
            "batch": state.clock.batch,
            "world_size": state.world_size,
            "samples": state.batch[0][:, 3].int().tolist(),
        }
        with open(f"seen/{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")
        time.sleep(0.1)


def slow_sync(descriptor, sync=os.fsync):
    time.sleep(0.1)  # long enough to be lost in
    sync(descriptor)


os.fsync = slow_sync


def task(batch_size: int = 3):
    return Task(
        model=lambda: Model(3, 3),
        loss=nn.functional.cross_entropy,
        train_dataloader=lambda: DataLoader(SAMPLES, batch_size, shuffle=True),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Records()],
        settings={"max_duration": "8ep", "checkpoint_interval": "5ba"},
    )
"""
ROOT = Path(__file__).parents[2]
LAUNCHER = ["-m", "torch.distributed.run"]
COMMAND = [
    *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
    *("--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-id", "run"),
    *("--local-addr", "127.0.0.1"),
    *("-m", "eventloop", "fit", "numbered.py", "--no-plugins", "--run-dir", "run"),
]
# Those of Slurm 24.05 that the script uses: https://slurm.schedmd.com/sbatch.html
SBATCH_OPTIONS = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "requeue", "no-kill"),
    *("open-mode", "signal"),
}
# A machine counts as lost after 6 s without a heartbeat; others may join for a second.
MEETING = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
NUM_EPOCHS = 8
NUM_STEPS_ALONE = NUM_EPOCHS * 20  # of one rank with 3 samples
WAIT_S = 120.0


class Machines:
    """Two machines on loopback, of which each may be lost, and come back.

    Args:
        folder: of the run.
    """

    def __init__(self, folder):
        (folder / "numbered.py").write_text(TASK)
        (folder / "seen").mkdir()
        self.folder = folder
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._agents = {}

    def start(self, name):
        """Starts a machine; one that was lost comes back."""
        where = ["--rdzv-endpoint", f"127.0.0.1:{self._store.port}", "--rdzv-conf", MEETING]
        # A machine that comes later finds the ranks' store with this alone (torch 2.13).
        given = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.start_as(name, [sys.executable, *LAUNCHER, *where, *COMMAND], given)

    def start_as(self, name, command, given):
        """Starts what is to be lost, or to be told to end, with variables of its own."""
        given = given | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with (self.folder / "stderr").open("ab") as errors:
            self._agents[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def send(self, name, number):
        """Sends a signal."""
        self._agents[name].send_signal(number)

    def lose(self, name):
        """Kills a machine outright, its rank with it."""
        self._agents[name].kill()
        self._agents[name].wait()

    def wait_for(self, condition):
        """Waits while at least one machine is there."""

        def is_over():
            left = [one for one in self._agents.values() if one.poll() is None]
            return condition() or not left

        assert wait_until(is_over, WAIT_S, poll_s=0.01), self.err()
        assert condition(), self.err()

    def end(self):
        """Waits for the end; returns the agents' exit statuses."""
        return [one.wait(WAIT_S) for one in self._agents.values()]

    def err(self):
        return (self.folder / "stderr").read_text()

    def rows(self):
        """Returns what was recorded."""
        texts = [file.read_text() for file in (self.folder / "seen").iterdir()]
        lines = (line for text in texts for line in text.splitlines(keepends=True))
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def trains_with(self, world_size, since):
        """Returns what is true when so many ranks have made a later step."""

        def is_true():
            return any(
                row["world_size"] == world_size and row["batch"] > since for row in self.rows()
            )

        return is_true

    def of_rank(self, rank):
        """Returns the machine of a rank."""
        pids = {row["rank"]: row["parent"] for row in self.rows()}
        return next(name for name, one in self._agents.items() if one.pid == pids[rank])

    def under_way(self):
        """Returns the checkpoints that are being written."""
        return list((self.folder / "run" / "checkpoints").glob(f"{UNDER_WAY}*"))

    def is_saving(self):
        """Returns whether a checkpoint is being written, and two have been."""
        return len(list((self.folder / "run" / "checkpoints").glob("ba*"))) > 1 and self.under_way()

    def close(self):
        for one in self._agents.values():
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@pytest.fixture
def machines(tmp_path):
    machines = Machines(tmp_path)
    yield machines
    machines.close()


def attempts_at(machines):
    """Returns the samples that each attempt saw in each step that all of its ranks have made.

    Returns:
        By step, then by attempt, in order of time.
    """
    seen = {}
    for row in sorted(machines.rows(), key=lambda row: row["at"]):
        of_step = seen.setdefault(row["batch"], {})
        of_step.setdefault((row["attempt"], row["world_size"]), []).append(row["samples"])
    return {
        batch: [
            sorted(itertools.chain(*samples))
            for (_, world_size), samples in of_step.items()
            if len(samples) == world_size
        ]
        for batch, of_step in seen.items()
    }


def in_parts(items, size):
    """Returns a list in parts of a size."""
    items = list(items)
    return [items[start : start + size] for start in range(0, len(items), size)]


def orders():
    """Returns the samples of each step as two ranks see them in a run that loses none."""
    steps = []
    for epoch in range(NUM_EPOCHS):
        sampler = DistributedSampler(range(60), 1, 0, seed=0)
        sampler.set_epoch(epoch)
        steps += [sorted(step) for step in in_parts(sampler, 6)]
    return dict(enumerate(steps, start=1))


def require_all_samples(machines):
    """Requires that each step saw its samples, in each attempt, and each epoch all of them once."""
    seen, expected = attempts_at(machines), orders()
    assert seen.keys() == expected.keys()
    for batch, attempts in seen.items():
        assert attempts, f"no attempt has made step {batch}"
        assert all(samples == expected[batch] for samples in attempts), (batch, attempts)
    last = [seen[batch][-1] for batch in sorted(seen)]
    for epoch in in_parts(last, 10):
        assert sorted(itertools.chain(*epoch)) == list(range(60))


@pytest.mark.nightly
def test_a_machine_that_is_lost_and_comes_back_leaves_no_trace(machines):
    """One goes on alone from the newest checkpoint, saves when the other is back, and both go on."""
    machines.start("first")
    machines.start("second")
    machines.wait_for(machines.trains_with(2, since=7))

    machines.lose("second")
    machines.wait_for(machines.trains_with(1, since=12))
    machines.start("second")
    machines.wait_for(machines.trains_with(2, since=20))

    assert machines.end() == [0, 0], machines.err()
    require_all_samples(machines)
    assert any(len(attempts) > 1 for attempts in attempts_at(machines).values())
    assert "batch_size 6 a rank, not 3: a step keeps the 6 samples" in machines.err()


@pytest.mark.nightly
@pytest.mark.parametrize("which", [0, 1])
def test_a_machine_that_is_lost_in_a_save_loses_no_checkpoint(machines, which):
    """Be it the one that writes: what it had begun counts for nothing, the save before it does."""
    machines.start("first")
    machines.start("second")
    machines.wait_for(machines.is_saving)
    lost = machines.of_rank(which)

    machines.lose(lost)
    left_over = machines.under_way()
    machines.wait_for(machines.trains_with(1, since=12))
    machines.start(lost)

    assert machines.end() == [0, 0], machines.err()
    assert left_over or which
    require_all_samples(machines)
    assert machines.under_way() == []


STANDINS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": '[[ $1 == show ]] && echo 127.0.0.1 || echo "$@" >> requeued',
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


def slurm_script():
    """Returns the script of the documents, for one rank a machine."""
    text = (ROOT / "docs" / "how-to" / "lose-a-machine.md").read_text()
    script = re.search(r"```bash\n(.*?)```", text, re.DOTALL)[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    here = {
        "--nproc-per-node 8": "--nproc-per-node 1",
        "task.py": "numbered.py --no-plugins",
        ":29500": f":{port}",
        "500ba": "5ba",
        "runs/my-run": "run",
    }
    for there, is_now in here.items():
        assert there in script
        script = script.replace(there, is_now)
    return script


def test_the_slurm_script_is_one():
    """Each directive is an option of sbatch, and bash reads the rest."""
    script = slurm_script()

    options = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)

    assert len(options) == 9
    assert set(options) <= SBATCH_OPTIONS
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.nightly
def test_the_slurm_script_saves_and_asks_to_be_queued_again(machines, tmp_path):
    """Told that its time is over, it ends the ranks in order; started again, the run goes on."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in STANDINS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(slurm_script())
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here"}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"

    machines.start_as("job", ["bash", "job.sh"], slurm | {"PATH": path})
    machines.wait_for(machines.trains_with(1, since=7))
    machines.send("job", signal.SIGUSR1)
    assert machines.end() == [0], machines.err()
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    machines.start_as("job", ["bash", "job.sh"], slurm | {"PATH": path})

    assert machines.end() == [0], machines.err()
    # Each was made once.
    made = {batch: len(attempts) for batch, attempts in attempts_at(machines).items()}
    assert made == dict.fromkeys(range(1, NUM_STEPS_ALONE + 1), 1)
