"""Promise A: any number of kills gives the bytes that no kill would have given.

Each row of `kill_table.py` trains twice, once without a kill and once with kills at drawn moments:
before the n-th event, and right after the last checkpoint was renamed, which is when all is trained and
nothing of the end is done. Processes are forks of this one, killed with SIGKILL.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import random
import runpy
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

from eventloop import hookimpl
from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.states import Generators
from eventloop.checkpoint.verifying import name_of
from eventloop.events import EVENTS as ALL_EVENTS
from eventloop.files import disk
from eventloop.run.differences import Allowed
from eventloop_jsonl import Jsonl
from eventloop_testing.case import isolated_trainer

TABLE = runpy.run_path(str(Path(__file__).with_name("kill_table.py")))
EVENTS = [one for one in ALL_EVENTS if one not in ("close", "exception")]
EXPECTED_WARNINGS = (
    "nothing to train",
    "[0-9]+ batches were read again",
    ".*may get other batches than before",
    ".*learning rate",
    ".*set_vital",  # torchdata 0.11 with torch 2.13
)
NUM_KILLS = 3  # a command: two at events, one after its last checkpoint


class Kill(NamedTuple):
    """When a process dies.

    Attributes:
        event: before the event of this number.
        saved: right after the checkpoint of this batch count was renamed to its name.
    """

    event: int | None = None
    saved: int | None = None


class Dies:
    """A callback that counts events, and kills its process before one of them."""

    name = "dies"
    free_options = ("kill",)

    def __init__(self, kill):
        self.kill = kill
        self.num_events = 0

    def count(self):
        if self.num_events == self.kill.event:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_events += 1


def _counting(event):
    def count(self, state):
        self.count()

    return hookimpl(tryfirst=True)(count)


for _event in EVENTS:
    setattr(Dies, _event, _counting(_event))


def train(folder, row, until, kill):
    """Trains to a length as `eventloop fit` does; returns the number of events."""
    loader, plugins, _ = row
    rename = disk.rename

    def rename_and_die(source, target):
        rename(source, target)
        if kill.saved is not None and target.name == name_of(kill.saved):
            os.kill(os.getpid(), signal.SIGKILL)

    disk.rename = rename_and_die
    disk.sync = disk.sync_folder = lambda *_: None  # no power fails here
    dies = Dies(kill)
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        with isolated_trainer(
            folder,
            TABLE["task"](loader),
            algorithms=TABLE["PLUGINS"][plugins](),
            callbacks=[dies, Jsonl()],
            allowed=Allowed(config_change=True),  # an extension changes max_duration
            max_duration=until,
            checkpoint_interval="3ba",
            checkpoint_keep=None,
            eval_interval="5ba",
            gc_interval=None,
        ) as trainer:
            trainer.fit()
    return dies.num_events


def in_fork(folder, row, until, kill=Kill()):
    """Trains in a process of its own; returns the number of events, None if it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        gc.freeze()  # garbage of the parent may need its threads to go
        try:
            os.write(writing, str(train(folder, row, until, kill)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writing)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # A worker that was started just before the kill can miss its parent's end (torch 2.13), and would
    # keep the pipe open.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with os.fdopen(reading) as pipe:
        written = pipe.read()
    assert written or status == -signal.SIGKILL, f"{until}, {kill}: failed, see stderr"
    return int(written) if written else None


def checkpoints_of(folder):
    """Returns the parts of all checkpoints of a run by name."""
    return {
        one.name: read_checkpoint(one).parts for one in (folder / "run/checkpoints").glob("ba*")
    }


def log_of(folder):
    """Returns the rows of the log, in order, without their seconds."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [{**row, "seconds": None} for row in rows]


def unlike(one, other):
    """Returns what differs between two runs, a line each."""
    first, second = checkpoints_of(one), checkpoints_of(other)
    found = [f"checkpoints: {sorted(first)}, {sorted(second)}"] if set(first) != set(second) else []
    for name in sorted(set(first) & set(second)):
        found += [f"{name}: {one}" for one in differences(first[name], second[name])]
    rows = itertools.zip_longest(log_of(one), log_of(other))
    found += [f"log: {row}, {twin}" for row, twin in rows if row != twin]
    return found


def kills(draw, last, num_events):
    """Draws the kills of a command; no process comes past its own."""
    early, again = draw.randrange(num_events // 2), draw.randrange(num_events // 4)
    yield Kill(event=early)
    yield Kill(event=again)
    yield Kill(saved=last)


def whole_and_killed(folder, row, seed):
    """Trains a row without kills and with them; returns both folders."""
    draw = random.Random(seed)
    for until, last in TABLE["commands"](row):
        num_events = in_fork(folder / "whole", row, until)
        for kill in kills(draw, last, num_events):
            assert in_fork(folder / "killed", row, until, kill) is None, f"{until}: not {kill}"
        in_fork(folder / "killed", row, until)
    return folder / "whole", folder / "killed"


def seeded(rows, marks=()):
    """Makes a parameter of each row, with its place in the table as the seed."""
    places = {row: seed for seed, row in enumerate(all_rows())}
    return [pytest.param(row, places[row], id=" + ".join(row), marks=marks) for row in rows]


def all_rows():
    return list(dict.fromkeys([*TABLE["rows"](), *TABLE["quick_rows"]()]))


def slow_rows():
    return [row for row in all_rows() if row not in TABLE["quick_rows"]()]


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """What forks need is imported once."""
    import torch._dynamo  # noqa: F401  AdamW wants it, and each fork would take seconds for it


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("row", "seed"),
    [*seeded(TABLE["quick_rows"]()), *seeded(slow_rows(), pytest.mark.nightly)],
)
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(tmp_path, row, seed):
    """Weights, optimizer, generators, plugins' states and log, in every checkpoint of the run."""
    whole, killed = whole_and_killed(tmp_path, row, seed)

    assert unlike(whole, killed) == []


def test_without_its_generators_a_killed_run_ends_otherwise(tmp_path, monkeypatch):
    """Control: the comparison sees what is lost with them."""
    monkeypatch.setattr(Generators, "go_on", lambda self, state: None)

    row = ("shuffled", "none", "in mid-epoch")
    (until, _), *_ = TABLE["commands"](row)
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    in_fork(whole, row, until)
    # Not at an event: the checkpoint before it may not be written as yet, so that nothing is lost.
    assert in_fork(killed, row, until, Kill(saved=3)) is None
    in_fork(killed, row, until)

    assert any("generators" in one for one in unlike(whole, killed))
    assert any("model" in one for one in unlike(whole, killed))


def test_a_night_has_300_kills():
    """The table is large enough to find what a few cases would not."""
    commands = [TABLE["commands"](row) for row in all_rows()]
    assert NUM_KILLS * len(list(itertools.chain(*commands))) >= 300
