"""How one rank ends, when, and who started it: all others are gone soon after, and it is named.

A row is a moment, a way and a launcher. The culprit is rank 1 of two. No process is left, however
it was started: all that a launcher starts inherits a mark in its environment.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

TIMEOUT_S = 8  # how long ranks wait for each other, also for those that start later
BOUND_S = 10  # from the event, or for a hang from the timeout, to the end of the last process
MARK = "RANK_ENDS_MARK"

TASK = """
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from eventloop import hookimpl
from eventloop_testing import tiny_task

MOMENT, WAY = os.environ["MOMENT"], os.environ["WAY"]


def end(moment):
    if moment != MOMENT or os.environ["RANK"] != "1":
        return
    Path("event").touch()
    if WAY == "raise":
        raise LookupError("on purpose")
    elif WAY.startswith("exit"):
        os._exit(int(WAY[-1]))
    elif WAY == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif WAY == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif WAY == "gil":
        ctypes.PyDLL(None).sleep(1000)
    else:
        time.sleep(1000)


class Ends:
    name = "ends"

    @hookimpl
    def init(self, state):
        end("building")

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == 0:
            end("first batch")

    @hookimpl
    def batch_end(self, state):
        if state.clock.batch == 2:
            end("training")

    @hookimpl(wrapper=True)
    def save_checkpoint(self, state):
        end("saving")
        return (yield)

    @hookimpl
    def eval_batch_start(self, state):
        end("evaluating")

    @hookimpl
    def close(self):
        end("closing")


def task():
    made = tiny_task(algorithms=[Ends()])
    made.settings |= {"device": "cpu", "max_duration": "2ep", "checkpoint_interval": "1ep"}
    return made


end("before joining")
"""

MOMENTS = (
    "before joining",
    "building",
    "first batch",
    "training",
    "saving",
    "evaluating",
    "closing",
)
WAYS = ("raise", "exit 0", "exit 1", "sigkill", "sigstop", "hang", "gil")
HANGS = ("sigstop", "hang", "gil")
LAUNCHERS = {
    "eventloop": ["-m", "eventloop", "fit", "ends.py", "--nproc", "2", "--no-plugins"],
    "torchrun": [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "eventloop", "fit", "ends.py", "--no-plugins"),
    ],
}
QUICK = [
    ("before joining", "exit 0", "eventloop"),
    ("training", "exit 0", "torchrun"),
    ("closing", "raise", "torchrun"),
]
ROWS = [
    pytest.param(
        *(moment, way, launcher),
        marks=[] if (moment, way, launcher) in QUICK else [pytest.mark.nightly],
        id=f"{moment}-{way}-{launcher}",
    )
    for moment in MOMENTS
    for way in WAYS
    for launcher in LAUNCHERS
]


class Launch(NamedTuple):
    """A launcher, and what all that it starts can be found by."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path

    def processes(self) -> list[int]:
        """Returns the processes that it, or one that it started, has started and that still run."""
        return [int(one.name) for one in Path("/proc").glob("[0-9]*") if self._is_one(one)]

    def gone_by(self, deadline: float) -> bool:
        """Waits for the end of all of them, until a time of `time.time`."""
        while (left := self.processes()) and time.time() < deadline:
            self.process.poll()
            time.sleep(0.05)
        return not left

    def event(self) -> float:
        """Waits for the culprit; returns when it was."""
        path = self.folder / "event"
        deadline = time.time() + 120
        while not path.exists():
            assert self.process.poll() is None, self.err()
            assert time.time() < deadline, "the event didn't happen"
            time.sleep(0.05)
        return path.stat().st_mtime

    def err(self) -> str:
        """Returns what was written to stderr."""
        return (self.folder / "stderr").read_text()

    def _is_one(self, folder: Path) -> bool:
        with suppress(OSError):
            return (
                f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes()
                and ") Z " not in (folder / "stat").read_text()
            )
        return False


@pytest.fixture
def launch(clean: Path) -> Iterator[object]:
    """Starts two ranks, one of which will end; whatever is left is killed."""
    launched = []

    def launch(launcher: str, moment: str, way: str, task: str = TASK) -> Launch:
        (clean / "ends.py").write_text(task)
        mark = uuid.uuid4().hex
        given = {"MOMENT": moment, "WAY": way, MARK: mark, "OMP_NUM_THREADS": "1"}
        given |= {"EVENTLOOP_TIMEOUT_S": str(TIMEOUT_S)}
        given |= {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        with (clean / "stderr").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *LAUNCHERS[launcher]],
                env=os.environ | given,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        launched.append(Launch(process, mark, clean))
        return launched[-1]

    yield launch
    for one in launched:
        while left := one.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        one.process.wait()


@pytest.mark.sampled(4)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
@pytest.mark.parametrize(("moment", "way", "launcher"), ROWS)
def test_a_rank_that_ends_ends_all_and_is_named_first(moment, way, launcher, launch):
    """Whatever became of one rank, nothing waits for it, and the first line is about it."""
    began = time.time()
    one = launch(launcher, moment, way)

    happened = one.event()
    # The other rank may still be starting, for as long as this one took; only then its timeout begins.
    starting_s = (happened - began) * (moment == "before joining")
    allowed_s = BOUND_S + (TIMEOUT_S + starting_s) * (way in HANGS)
    is_gone = one.gone_by(happened + allowed_s)
    took_s = time.time() - happened

    # A status other than 0 torchrun notices first, and its SIGTERM may end the others before they
    # say anything; its own message names the rank.
    told = r"ranks? (\d)" if launcher == "eventloop" else r"ranks? (\d)|.*failed .*local_rank: (\d)"
    named = [line for line in one.err().splitlines() if re.match(told, line)]
    print(f"{moment} | {way} | {launcher} | {took_s:.1f} s | {named[:1]}")
    assert is_gone, (one.processes(), one.err())
    assert one.process.wait() != 0
    assert "1" in re.match(told, named[0]).groups(), one.err()


@pytest.mark.sampled(6)
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc")
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "way", ["hang", "gil", pytest.param("sigstop", marks=[pytest.mark.nightly])]
)
def test_ranks_end_with_a_launcher_that_is_killed(way, launcher, launch):
    """While they start, none of them asks for the launcher's store for minutes."""
    one = launch(launcher, "before joining", way)
    one.event()

    one.process.kill()

    assert one.gone_by(time.time() + BOUND_S), one.processes()
