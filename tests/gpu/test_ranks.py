"""Ranks on accelerators, under NCCL on GPUs: one on one, which is what DDP does to a step; two on two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import eventloop

SOURCE = Path(eventloop.__file__).parents[1]

TASK = """
import os
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from eventloop import Task

inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
world_size = int(os.environ.get("WORLD_SIZE", "1"))
task = Task(
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)),
    loss=cross_entropy,
    train_dataloader=DataLoader(TensorDataset(inputs, inputs.argmax(1)), 16 // world_size),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    settings={"max_duration": "3ep", "clip_norm": 0.5, "microbatch_size": 4, "precision": "fp32"},
)
"""

# WORLD_SIZE=1 alone would train in one process: here it joins a group of one, and is wrapped in DDP.
ONE_RANK = """
import sys
from contextlib import nullcontext
import torch
import eventloop.run.open
from eventloop_testing import pretend_device
from eventloop import Trainer, hookimpl
from eventloop.distributed import data_parallel
from torch.nn.parallel import DistributedDataParallel
from task import task

class Guard:
    @hookimpl(tryfirst=True)
    def after_dataloader(self, state):
        if state.device.type == "cuda" and state.clock.batch >= 4:
            torch.cuda.set_sync_debug_mode("error")

    @hookimpl(tryfirst=True)
    def batch_checkpoint(self, state):
        if state.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")

eventloop.run.open.join_processes = data_parallel.join
is_pretend = sys.argv[1].startswith("pretend")
with pretend_device() if is_pretend else nullcontext(), Trainer(task, algorithms=[Guard()], device=sys.argv[1], autoload=False) as trainer:
    assert isinstance(trainer.state.wrapped_model, DistributedDataParallel)
    trainer.fit()
    trainer.export("weights.safetensors")
"""


# The command in a process that has the pretend accelerator.
ON_TWO = "-m torch.distributed.run --standalone --nproc-per-node 2 on_pretend.py"
ON_PRETEND = """
import sys
from eventloop.cli import main
from eventloop_testing import pretend_device

with pretend_device():
    sys.exit(main())
"""


@pytest.fixture
def run(clean):
    """Runs Python in processes of its own, with the task at hand; gives the weights it exported."""
    (clean / "task.py").write_text(TASK)
    (clean / "one_rank.py").write_text(ONE_RANK)
    (clean / "on_pretend.py").write_text(ON_PRETEND)
    path = os.pathsep.join([str(SOURCE), str(clean), os.environ.get("PYTHONPATH", "")])

    def run(*arguments: str, **variables: str) -> dict[str, Tensor]:
        environ = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                              check=False, env=environ, timeout=240)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return load_file("weights.safetensors")

    return run


@pytest.fixture
def alone(make_trainer):
    """Trains the task in this process; gives the weights, on the CPU."""

    def alone(device, **settings):
        values = {}
        exec(TASK, values)
        trainer = make_trainer(values["task"], device=device, max_duration="3ep", **settings)
        trainer.fit()
        return {name: one.cpu() for name, one in trainer.state.model.state_dict().items()}

    return alone


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_one_rank_under_ddp_ends_as_one_process_does(device, run, alone):
    """Its steps wait for nothing, sums over the ranks included."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}  # fmt: skip

    actual = run("one_rank.py", str(device), **group)

    assert_near(actual, alone(str(device)))
    with pytest.raises(AssertionError):  # control: other gradients are seen
        assert_near(actual, alone(str(device), clip_norm=0.4))


@pytest.mark.nightly
def test_two_ranks_end_as_one_process_does(two_ranks_on, run, alone):
    """Gradients averaged over both, with microbatches and clipping; one device each."""
    command = "-m eventloop fit task.py --no-plugins --nproc 2 --microbatch-size 2"
    if two_ranks_on == "pretend":
        command = command.replace("-m eventloop", ON_TWO).replace("--nproc 2 ", "")
    actual = run(*command.split(), "--device", two_ranks_on, "--export", "weights.safetensors")

    assert_near(actual, alone(two_ranks_on))
