"""`--nproc`: several ranks from one command line, and how they end together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from eventloop.cli.arguments import Arguments
from eventloop.cli.launch import launch, without_nproc
from eventloop.errors import UsageError

# Without metrics, for which each process would import torchmetrics.
BARE = """
import torch

from eventloop import Task


def task():
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.TensorDataset(inputs, inputs.argmax(1))
    return Task(
        model=lambda: torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=torch.utils.data.DataLoader(batches, batch_size=4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"max_duration": "2ep", "device": "cpu"},
    )
"""
FAILING = """
import os
import signal

from eventloop import hookimpl
from bare import task as bare_task


class Ends:
    name = "ends"

    def __init__(self, how):
        self.how = how

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1 and state.clock.batch == 2:
            if self.how == "raise":
                raise LookupError("nothing found")
            os.kill(os.getpid(), signal.SIGKILL) if self.how == "kill" else os._exit(7)


def task(how: str = "raise"):
    made = bare_task()
    made.callbacks = [Ends(how)]
    made.settings["max_duration"] = "100000ep"
    return made
"""


@pytest.fixture
def start(tiny: Path):
    """Runs `eventloop ...` in a process of its own, beside a task that trains in a blink."""
    (tiny / "bare.py").write_text(BARE)

    def start(*argv: str, through: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        source = Path(__file__).parents[2] / "src"
        path = os.pathsep.join([str(tiny), str(source)])
        return subprocess.run(
            [sys.executable, *through, "-m", "eventloop", *argv],
            cwd=tiny,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return start


def test_two_ranks_say_everything_once(start, tiny):
    """Header, results and files are those of one run."""
    ran = start("fit", "bare.py", "--nproc", "2", "--no-plugins", "--export", "w.safetensors")

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("torch ") == 1
    assert ran.stdout.count("2 epochs, 4 batches") == 1
    assert "2 ranks" in ran.stdout
    assert (tiny / "w.safetensors").is_file()
    assert len(list((tiny / "runs" / "bare").iterdir())) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "status", "first"),
    [
        ("raise", 1, "rank 1: LookupError: nothing found; raised by plugin ends"),
        ("kill", 137, r"rank 1: its process \d+ ended without reporting an error"),
        ("exit", 7, r"rank 1: its process \d+ ended without reporting an error"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named_first(start, tiny, how, status, first):
    """Nobody waits for it, and nobody who lost it speaks before."""
    (tiny / "failing.py").write_text(FAILING)

    ran = start("fit", "failing.py", "--nproc", "2", "--no-plugins", "--task.how", how)

    closing = {
        "raise": "ended with status 1",
        "kill": "was ended by SIGKILL",
        "exit": "ended with status 7",
    }
    assert ran.returncode == status
    assert re.match(first, ran.stderr)
    assert re.search(rf"(?m)^rank 1 {closing[how]} \(process \d+\)", ran.stderr)
    assert ran.stderr.count("Traceback") == (how == "raise")


RECOVERING = FAILING.replace(
    "if state.rank == 1",
    'if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and state.rank == 1',
).replace("100000ep", "2ep")


@pytest.mark.nightly
def test_a_restart_of_torchrun_s_is_not_ended_by_the_failure_before(start, tiny):
    """What ranks told each other stays in the store that the next attempt uses."""
    (tiny / "recovering.py").write_text(RECOVERING)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]

    ran = start("fit", "recovering.py", "--no-plugins", through=[*torchrun, "--standalone"])

    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("rank 1: LookupError: nothing found; raised by plugin ends") == 1
    assert ran.stdout.count("2 epochs, 4 batches") == 1


@pytest.mark.nightly
def test_what_is_wrong_on_all_ranks_is_said_once(start):
    """A task that isn't there is missing for everybody."""
    ran = start("fit", "tinny.py", "--nproc", "2")

    assert ran.returncode == 2
    assert ran.stderr.count("TaskFileError") == 1


@pytest.mark.parametrize("nproc", ["0", "two", "-1", "1.5"])
def test_a_number_of_processes_is_needed(nproc):
    """Zero processes train nothing."""
    with pytest.raises(UsageError, match=r"--nproc takes a whole number, 1 or more"):
        Arguments(given={"nproc": nproc}).count("nproc")


def test_torchrun_and_nproc_together_are_refused(monkeypatch):
    """Each rank would start ranks of its own."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(UsageError, match=r"one of 4 already[\s\S]*leave --nproc out"):
        launch("fit", ["t.py", "--nproc", "2"], 2)


def test_the_option_is_left_out_for_the_ranks():
    """In either way to write it; what follows it stays."""
    assert without_nproc(["t.py", "--nproc", "2", "--seed", "3"]) == ["t.py", "--seed", "3"]
    assert without_nproc(["--nproc=2", "t.py"]) == ["t.py"]


def test_more_processes_than_cores_are_warned_of(monkeypatch, capsys):
    """They work, but slowly."""
    monkeypatch.setattr("eventloop.cli.launch._run", lambda num, arguments: num)

    assert launch("fit", ["t.py", "--nproc", "4000"], 4000) == 4000
    assert "4000 processes share" in capsys.readouterr().err


FORGING = """
import json
import os

from eventloop import hookimpl
from torch.distributed import TCPStore
from bare import task as bare_task


class Stranger:
    name = "stranger"

    @hookimpl
    def batch_end(self, state):
        if state.rank == 1 and state.clock.batch == 2:
            store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
            line = "\\x1b[31mrank 1: a text of somebody else\\x1b[0m"
            values = dict(rank=1, line=line, details="fix", status=0, reported_by=-1)
            for sealed in ("", "0" * 32):
                for form in (values, list(values.values())):
                    store.set("eventloop/0/0/failure", sealed + json.dumps(form))
                    store.set("eventloop/0/member/0", sealed + json.dumps(["here", 1, True, 1]))
            store.add("eventloop/0/num_done", 1)


def task():
    made = bare_task()
    made.callbacks = [Stranger()]
    made.settings["max_duration"] = "40ep"
    return made
"""


def test_what_a_stranger_writes_into_the_store_has_no_effect(start, tiny):
    """Any process of the machine reaches its port; none but the ranks knows the token."""
    (tiny / "forging.py").write_text(FORGING)

    ran = start("fit", "forging.py", "--nproc", "2", "--no-plugins")

    assert ran.returncode == 0, ran.stderr
    assert "somebody else" not in ran.stderr + ran.stdout
    assert "40 epochs, 80 batches" in ran.stdout


LEAVING = """
import atexit
import ctypes
import os
import subprocess
import sys
import threading
import time

from eventloop import hookimpl
from bare import task as bare_task


def hang():
    time.sleep(1000)


class Leaves:
    name = "leaves"

    def __init__(self, way):
        self.way = way

    @hookimpl
    def fit_start(self, state):
        if state.rank != 1:
            return
        if self.way == "handler":
            atexit.register(hang)
        elif self.way == "thread":
            threading.Thread(target=hang).start()
        elif self.way == "gil":
            atexit.register(ctypes.PyDLL(None).sleep, 1000)
        elif self.way == "child":
            print("child", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        elif self.way == "stubborn child":
            command = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
            print("child", subprocess.Popen([sys.executable, "-c", command]).pid, flush=True)


def task(way: str):
    made = bare_task()
    made.callbacks = [Leaves(way)]
    return made
"""


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (
            "handler",
            r"hasn't ended 6 s after the run: it is in an exit handler, at \S+/leaving.py:\d+",
        ),
        pytest.param("thread", "it waits for the thread 'Thread-", marks=pytest.mark.nightly),
    ],
    ids=["handler", "thread"],
)
@pytest.mark.parametrize(
    "through",
    [[], pytest.param(["torchrun"], marks=pytest.mark.nightly)],
    ids=["nproc", "torchrun"],
)
def test_a_rank_that_hangs_after_a_good_end_is_ended_and_named(start, tiny, way, reason, through):
    """The launcher waited for ever: an exit handler, or a thread that isn't a daemon."""
    (tiny / "leaving.py").write_text(LEAVING)
    argv = ("fit", "leaving.py", "--no-plugins", "--task.way", way, "--export", "w.safetensors")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ran = start(*argv, through=torchrun) if through else start(*argv, "--nproc", "2")

    assert ran.returncode == 1
    assert re.search(rf"(?m)^rank 1: its process \d+ .*{reason}", ran.stderr)
    assert "2 epochs, 4 batches" in ran.stdout
    assert (tiny / "w.safetensors").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone shows the names of processes")
@pytest.mark.parametrize(
    "way", ["child", pytest.param("stubborn child", marks=pytest.mark.nightly)]
)
def test_processes_that_a_rank_leaves_behind_end_with_the_run(start, tiny, way):
    """After a good end, too: they hold memory of a GPU, and ports."""
    (tiny / "leaving.py").write_text(LEAVING)

    ran = start("fit", "leaving.py", "--nproc", "2", "--no-plugins", "--task.way", way)

    (pid,) = re.findall(r"(?m)^child (\d+)$", ran.stdout)
    assert ran.returncode == 0, ran.stderr
    name = "sleep" if way == "child" else r"python\S*"
    assert re.search(
        rf"^rank 1 has left processes behind, now ended: {name} \({pid}\)$", ran.stderr
    )
    stat = Path("/proc", pid, "stat")
    assert not stat.exists() or ") Z " in stat.read_text()


@pytest.mark.nightly
def test_a_rank_that_runs_no_python_after_a_good_end_is_killed(start, tiny):
    """Then no thread of it can tell; the launcher does. torchrun would wait."""
    (tiny / "leaving.py").write_text(LEAVING)

    ran = start("fit", "leaving.py", "--nproc", "2", "--no-plugins", "--task.way", "gil")

    assert ran.returncode == 1
    assert re.search(
        r"^rank 1: its process \d+ hadn't ended 8 s after the run, and was killed", ran.stderr
    )
