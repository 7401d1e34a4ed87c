"""Signals to the command: a checkpoint, then the exit status that shells expect."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENDLESS = r"""
import os
from pathlib import Path

import torch

from eventloop import Task, hookimpl


class Saves:
    name = "saves"
    saved = None

    @hookimpl
    def save_checkpoint(self, state):
        self.saved = state.clock.batch
        # In one piece, since two ranks write.
        os.write(1, f"saved {state.clock.batch}\n".encode())
        return Path("nowhere")

    @hookimpl
    def batch_end(self, state):
        if state.rank == 0 and state.clock.batch == 3:
            print("trains", flush=True)
        if state.rank == 0 and self.saved == state.clock.batch - 1:
            print("goes on", flush=True)


def task():
    return Task(  # without metrics, for which each process would import torchmetrics
        model=lambda: torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[(torch.ones(4, 3), torch.ones(4).long())] * 4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[Saves()],
        settings={"max_duration": "10000000ba", "device": "cpu"},
    )
"""


class Running:
    """A command of which the tests read the output line by line."""

    def __init__(self, folder, *argv):
        source = Path(__file__).parents[2] / "src"
        paths = os.pathsep.join([str(folder), str(source)])
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Shells ignore it in what they start in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def read_until(self, line):
        """Returns what is printed up to a line."""
        before = []
        for found in self.process.stdout:
            if found.strip() == line:
                return before
            before.append(found)
        raise AssertionError(f"no {line!r} in {before}: {self.process.stderr.read()}")

    def end(self):
        """Returns the exit status, the lines since but for progress, and what stderr has."""
        out, err = self.process.communicate(timeout=100)
        lines = [one for one in out.splitlines() if not one.startswith("epoch ")]
        return self.process.returncode, lines, err

    def line(self):
        """Returns the next line that isn't of progress."""
        return next(one for one in self.process.stdout if not one.startswith("epoch "))


@pytest.fixture
def start(tiny):
    """Starts a fit that never ends by itself; kills what is left."""
    (tiny / "endless.py").write_text(ENDLESS)
    running = []

    def start(*options):
        command = ["-m", "eventloop", "fit", "endless.py", "--no-plugins", *options]
        running.append(Running(tiny, *command))
        return running[-1]

    yield start
    for one in running:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.stdout.close()
        one.process.stderr.close()
        one.process.wait()


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGINT, -signal.SIGINT, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize("options", [[], ["--nproc", "2"]], ids=["one process", "two ranks"])
def test_the_command_saves_once_and_exits(start, number, status, word, options):
    """A terminal sends Ctrl-C to all processes in the foreground, a scheduler often to one."""
    running = start(*options)
    running.read_until("trains")
    if number == signal.SIGINT:
        os.killpg(running.process.pid, number)
    else:
        running.process.send_signal(number)
    found, out, err = running.end()

    num_ranks = 2 if options else 1
    assert found == status
    assert len(out) == num_ranks
    assert len(set(out)) == 1
    batch = out[0].removeprefix("saved ")
    assert err == f"{word} after batch {batch}\n"


@pytest.mark.nightly
def test_a_checkpoint_is_saved_once_and_training_goes_on(start):
    """SIGUSR1 to what started the ranks."""
    running = start("--nproc", "2")
    running.read_until("trains")
    running.process.send_signal(signal.SIGUSR1)
    first, second = running.line(), running.line()
    running.read_until("goes on")
    running.process.terminate()
    status, out, _ = running.end()

    assert first == second
    assert first.startswith("saved ")
    assert len(out) == 2
    assert status == 143


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--nproc", "2"]], ids=["one process", "two ranks"])
def test_sigterm_ends_the_start_at_once(start, options, tiny):
    """Nothing has been trained, so that there is nothing to save."""
    (tiny / "endless.py").write_text(
        f"{ENDLESS}\nprint('starts', flush=True)\nimport time; time.sleep(60)\n"
    )
    running = start(*options)
    running.read_until("starts")
    running.process.terminate()
    status, _, err = running.end()

    # A shell makes 143 of either.
    assert status in (143, -signal.SIGTERM)
    assert err == ""
