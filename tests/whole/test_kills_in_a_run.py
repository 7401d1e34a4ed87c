"""Kills between any two operations on files of a run: in a save, a prune, and a resume."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
import warnings

import pytest
import torch
from torch import nn

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store
from eventloop.files import disk
from eventloop_testing.case import isolated_trainer, tiny_batches, tiny_task

# What changes what the next process finds; to wait for the disk doesn't.
CHANGES = ("make_folder", "write", "rename", "remove_file", "remove_empty")
KILLED = 9
AFTER_A_SAVE = 5  # who trains is noted, a folder is made, written to, and renamed


def train(folder):
    """Trains two batches; saves each and keeps one, so that each save prunes."""
    given = {"checkpoint_interval": "1ba", "checkpoint_keep": 1, "gc_interval": None}
    task = tiny_task(
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
        train_dataloader=tiny_batches(2),
        eval_dataloaders=None,
        metrics=None,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    )
    with isolated_trainer(folder, task, **given) as trainer, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "nothing to train")  # killed after its last save
        disk.sync = disk.sync_folder = lambda *_: None  # no power fails here
        trainer.fit()


def in_fork(function, *arguments):
    """Calls a function in a process of its own; gives its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 70
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def train_until_killed(folder, kill_at):
    """Trains; the process ends where it begins to do something else to the disk than before.

    Where it writes it ends halfway through. What lies between two such moments is tested with the
    store alone.
    """
    num_left = kill_at
    kind_before = ""

    def dying(name, function):
        def operate(*arguments):
            nonlocal num_left, kind_before
            if name != kind_before:
                num_left -= 1
                kind_before = name
            if num_left < 0:
                if name == "write":
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os._exit(KILLED)
            return function(*arguments)

        return operate

    for name in CHANGES:
        setattr(disk, name, dying(name, getattr(disk, name)))
    train(folder)


def result(folder):
    path, refused = Store(folder / "run" / "checkpoints").latest()
    assert not refused
    return read_checkpoint(path).parts


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns what a run that nobody killed ends with."""
    import torch._dynamo  # noqa: F401  AdamW wants it, and each fork would take seconds for it

    folder = tmp_path_factory.mktemp("whole")
    assert in_fork(train, folder) == 0
    return result(folder)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Returns a run that was killed: it has a checkpoint, and what half a save left."""
    for kill_at in range(AFTER_A_SAVE, 40):
        folder = tmp_path_factory.mktemp("begun")
        assert in_fork(train_until_killed, folder, kill_at) == KILLED
        left = {one.name[:4] for one in (folder / "run" / "checkpoints").iterdir()}
        if left == {"ba00", ".tmp"}:
            return folder
    raise AssertionError("no kill left half a save")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_begun", [False, True], ids=["from the start", "in a resume"])
def test_killed_at_any_change_of_the_disk_it_ends_the_same(tmp_path, expected, begun, is_begun):
    """In the first save; while a resume clears up, saves, prunes and replaces what it has saved."""
    for kill_at in range(1000 if is_begun else AFTER_A_SAVE):
        folder = tmp_path / str(kill_at)
        if is_begun:
            shutil.copytree(begun, folder)
        store = Store(folder / "run" / "checkpoints")
        before, _ = store.latest()
        status = in_fork(train_until_killed, folder, kill_at)
        after, _ = store.latest()
        if status == 0:
            break
        assert status == KILLED

        assert before is None or (after is not None and position(before) <= position(after))
        assert in_fork(train, folder) == 0
        assert list(differences(expected, result(folder))) == []
        shutil.rmtree(folder)
    assert kill_at >= (15 if is_begun else AFTER_A_SAVE - 1)


def position(path):
    """Returns the batch of a checkpoint, also of one that is being replaced."""
    return int(path.name.partition("ba")[2][:8])
