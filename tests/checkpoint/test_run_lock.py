"""One process trains in a folder, and a run whose folder is deleted or replaced under it says so at its next save."""

from __future__ import annotations

import os
import shutil

import pytest

from eventloop import Trainer
from eventloop.checkpoint.run_lock import RunLock
from eventloop.errors import ResumeError, RunFolderError
from eventloop_testing.case import tiny_task


@pytest.fixture
def vanishing(make_plugin, make_trainer, tmp_path):
    """Trains in a folder to which something is done after the second batch."""

    def vanishing(change, **given):
        def batch_end(state):
            if state.clock.batch == 2:
                change(tmp_path / "run")

        trainer = make_trainer(
            callbacks=[make_plugin(batch_end=batch_end)], run_dir=tmp_path / "run", **given
        )
        trainer.fit()

    return vanishing


def replace(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / ".lock").touch()


@pytest.mark.parametrize("change", [shutil.rmtree, lambda one: one.rename("moved"), replace])
@pytest.mark.parametrize("interval", ["3ba", "6ba"])
def test_a_folder_that_vanishes_is_told_of(change, interval, vanishing):
    """What is saved into a folder made anew would be half a run, unlocked."""
    with pytest.raises(ResumeError, match="was deleted or replaced while the run was active"):
        vanishing(change, checkpoint_interval=interval, max_duration="6ba")


def test_a_folder_that_stays_is_not_told_of(vanishing):
    """The negative control."""
    vanishing(lambda folder: (folder / "note").touch(), checkpoint_interval="1ba")


def test_a_folder_in_the_place_of_the_lock_is_an_error(tmp_path):
    """With the reason and a way out, not a traceback of the operating system's."""
    (tmp_path / ".lock").mkdir()

    with pytest.raises(RunFolderError, match=r"lock' is a folder, but the run needs[^$]*run_dir="):
        RunLock(tmp_path).acquire()


# Without metrics, for which a process imports torchmetrics.
BARE = """
import torch
from eventloop import Task, Trainer

trainer = Trainer(
    Task(
        model=lambda: torch.nn.Linear(3, 3),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=[(torch.ones(4, 3), torch.ones(4).long())] * 3,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    ),
    device="cpu", run_dir="out", max_duration="1ep", autoload=False,
)
"""


@pytest.mark.nightly
def test_a_second_process_in_the_folder_is_refused(clean, run_python):
    """They would write over each other."""
    exec(BARE, first := {})
    with first["trainer"] as trainer:
        trainer.fit("1ba")
        done = run_python(f"{BARE}trainer.fit()")

    import platform

    assert "ResumeError: another process trains in out" in done.stderr
    assert f"process {os.getpid()} on '{platform.node()}'" in done.stderr


def test_a_worker_that_outlives_its_run_locks_nobody_out(tmp_path):
    """Processes that load data end seconds after the training was killed."""
    outlives, end = os.pipe()
    pid = os.fork()
    if not pid:
        RunLock(tmp_path).acquire()
        if not os.fork():
            os.close(end)
            os.read(outlives, 1)
        os._exit(0)
    os.close(outlives)
    os.waitpid(pid, 0)

    lock = RunLock(tmp_path)
    lock.acquire()

    lock.release()
    os.close(end)


def test_a_second_trainer_of_one_process_is_told_so(clean):
    """In a notebook the first one is still open."""
    given = {"device": "cpu", "run_dir": clean / "out", "max_duration": "1ep"}
    with Trainer(tiny_task(), **given) as first, Trainer(tiny_task(), **given) as second:
        first.fit("1ba")

        with pytest.raises(ResumeError, match="another Trainer of this process trains in"):
            second.fit()
