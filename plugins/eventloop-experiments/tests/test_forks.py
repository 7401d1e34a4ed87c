"""Runs that are forks of a prepared process: the bits of new processes, and their ends."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

import eventloop
import eventloop_experiments
from eventloop import PluginError
from eventloop_experiments.runs import RunProcesses, RunsFolder, check_rows
from eventloop_experiments.runs.fork_server import fork_obstacle, num_threads, rng_states
from eventloop_testing import run_ranks

HELPER = "import random\n\nDRAWN = random.random()\n"
TASK = """
import os
import random
import signal

import numpy
import torch
from helper import DRAWN

from eventloop import Task

SCALE = random.random() + numpy.random.rand()


def task(lr: float = 0.1, end: str = ""):
    def loss(outputs, targets):
        if end:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(outputs * DRAWN * SCALE, targets)

    batches = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(3)]
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout()),
        loss=loss,
        train_dataloader=batches,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        settings={"max_duration": "2ep", "device": "cpu"},
    )
"""


@dataclass(frozen=True)
class Trial:
    """A run that keeps its weights."""

    name: str
    argv: tuple[str, ...]

    @property
    def place(self) -> Path:
        return Path(self.name)


def trial(name, *more):
    line = ("fit", "tiny.py", "--no-plugins", "--checkpoint-interval", "none", *more)
    return Trial(name, (*line, f"--export={name}.safetensors"))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The process's working directory, with a task and a module beside it that draw numbers."""
    for name in [one for one in os.environ if one.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(name)
    sources = [str(Path(one.__file__).parents[1]) for one in (eventloop, eventloop_experiments)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sources))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tiny.py").write_text(TASK)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def processes_of(folder):
    """The numbers that the runs of a folder noted, of the processes that started them."""
    return {one.read_text() for one in folder.glob("*.parent")}


@pytest.mark.nightly
def test_a_forked_run_ends_with_the_bits_of_a_new_process(tiny):
    """Whatever ran before, and though a run in between was killed."""
    (tiny / "tiny.py").write_text(
        TASK + "\nopen(f'{os.getpid()}.parent', 'w').write(str(os.getppid()))\n"
    )
    runs = [trial("a"), trial("b", "--task.end=now"), trial("c", "--task.lr=0.3"), trial("d")]
    with RunProcesses(RunsFolder(tiny / "here", "trial")) as processes:
        outcomes = [*processes.outcomes(runs)]
    forked_by = processes_of(tiny)
    new = [sys.executable, "-m", "eventloop", *trial("new").argv]
    subprocess.run(new, check=True, capture_output=True)

    weights = {one.stem: one.read_bytes() for one in tiny.glob("*.safetensors")}
    assert [one.reason for one in outcomes] == ["", "ended by SIGKILL", "", ""]
    assert str(os.getpid()) not in forked_by
    assert weights["a"] == weights["d"] == weights["new"] != weights["c"]


FAILING = """
print("ValueError: the first attempt failed, the second didn't")
raise LookupError("nothing found")
"""


@pytest.mark.nightly
def test_the_reason_is_what_fit_raised_not_what_the_task_printed(tiny):
    """Of a fork and of a new process, which runs of several ranks are."""
    (tiny / "tiny.py").write_text(TASK + FAILING)
    runs = [trial("fork"), trial("ranks", "--nproc", "2")]
    with RunProcesses(RunsFolder(tiny / "here", "trial")) as processes:
        reasons = {one.run.name: one.reason for one in processes.outcomes(runs)}

    failure = "TaskError: tiny.py raises LookupError: nothing found"
    assert reasons["fork"] == failure
    assert reasons["ranks"] in [f"rank {rank}: {failure}" for rank in range(2)]


ENDING = """
import atexit
import ctypes
import threading
import time


class Last:
    def __del__(self, write=lambda text, open=open: open("del.txt", "w").write(text)):
        write("deleted")


LAST = Last()
FILE = open("unflushed.txt", "w")
FILE.write("flushed")
KEPT = [open("kept.txt", "w")]
KEPT[0].write("flushed, too")
__import__("builtins").KEPT = KEPT
atexit.register(lambda: open("atexit.txt", "w").write("called"))
THREAD = threading.Thread(target=lambda: (time.sleep(0.3), open("thread.txt", "w").write("joined")))
THREAD.start()
ctypes.CDLL(None).printf(b"printed by a library\\n")
"""


@pytest.mark.nightly
def test_a_fork_leaves_what_a_new_process_leaves(tiny):
    """Though it doesn't free what it was forked with: files, threads and finalizers are its own."""
    (tiny / "tiny.py").write_text(TASK + ENDING)
    with RunProcesses(RunsFolder(tiny / "here", "trial")) as processes:
        [outcome] = processes.outcomes([trial("a")])
    left = {one.name: one.read_text() for one in tiny.glob("*.txt")}
    printed = outcome.log.read_text()

    assert outcome.reason == ""
    assert left == {
        "atexit.txt": "called",
        "del.txt": "deleted",
        "kept.txt": "flushed, too",
        "thread.txt": "joined",
        "unflushed.txt": "flushed",
    }
    assert printed.count("printed by a library") == 1


@pytest.mark.nightly
def test_a_fork_begins_with_the_modules_that_the_command_adds(tiny):
    """To import these in each run, Optuna say, would take longer than the rest of its start."""
    seen = "open('seen.txt', 'w').write(str('colorsys' in sys.modules) + str(gc.get_freeze_count() > 0))"
    (tiny / "tiny.py").write_text(f"{TASK}\nimport gc, sys\n{seen}\n")
    folder = RunsFolder(tiny / "here", "trial")
    with RunProcesses(folder, modules=["colorsys"]) as processes:
        outcomes = [*processes.outcomes([trial("a")])]

    assert [one.reason for one in outcomes] == [""]
    assert (tiny / "seen.txt").read_text() == "TrueTrue"


@pytest.mark.nightly
def test_what_a_fork_shares_is_left_to_the_system(tiny, monkeypatch):
    """To free it would copy each of its pages first, which takes a second or more."""
    (tiny / "libs").mkdir()
    (tiny / "libs" / "shared.py").write_text(
        "class Shared:\n"
        "    def __del__(self, open=open):\n"
        "        open('freed.txt', 'w').close()\n\n\n"
        "SHARED = Shared()\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(tiny / "libs")])
    monkeypatch.setenv("PYTHONPATH", path)
    (tiny / "tiny.py").write_text(TASK + "\nimport shared\n")
    folder = RunsFolder(tiny / "here", "trial")
    with RunProcesses(folder, modules=["shared"]) as processes:
        outcomes = [*processes.outcomes([trial("a")])]

    assert [one.reason for one in outcomes] == [""]
    assert not (tiny / "freed.txt").exists()


def reasons():
    """Returns what keeps a process from being forked: as it is, with a thread, after a draw."""
    before, num_before, found = rng_states(), num_threads(), []
    found.append(fork_obstacle(num_before, before))
    timer = threading.Timer(99, print)
    timer.start()
    found.append(fork_obstacle(num_before, before))
    timer.cancel()
    timer.join()
    random.random()
    return [*found, fork_obstacle(num_threads(), before)]


@pytest.mark.about_cpu  # a process with an accelerator is never forked
def test_an_import_that_does_more_than_define_ends_forking():
    """A thread would be missing in a fork, and a number that was drawn would be drawn once only."""
    (found,) = run_ranks(reasons, world_size=1)  # a new process, without threads of other tests

    assert found == ["", "an import has started threads", "an import has drawn random numbers"]


@pytest.mark.nightly
def test_all_rows_that_cannot_be_trained_are_one_error(tiny):
    """Not one after the other, the last of them after hours."""
    picky = (
        "class Picky:\n    role = 'algorithm'\n    @hookimpl\n    def unsuitable(self, state):\n"
    )
    (tiny / "picky.py").write_text(
        "from eventloop import hookimpl\n\n\n"
        f"{picky}        return 'it needs images'\n"
        "    @hookimpl\n    def fit_start(self, state):\n        pass\n"
    )
    line = ("fit", "tiny.py", "--no-plugins")
    rows = {"good": line, "images": (*line, "-ppicky:Picky"), "typo": (*line, "--task.rl=1")}

    with pytest.raises(PluginError) as caught:
        check_rows(rows)

    message = str(caught.value)
    assert message.startswith("2 problems in 3 rows; nothing was trained")
    assert "images: PluginError: " in message
    assert "it needs images" in message
    assert "typo: SettingError: " in message
