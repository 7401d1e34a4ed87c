"""A run whose folder is deleted or replaced under it says so at its next save, and fails."""

from __future__ import annotations

import shutil

import pytest

from eventloop.checkpoint.run_lock import RunLock
from eventloop.errors import EventloopError, ResumeError, RunFolderError


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
    with pytest.raises(ResumeError, match="was deleted or replaced while the run was under way"):
        vanishing(change, checkpoint_interval=interval, max_duration="6ba")


def test_a_folder_that_stays_is_not_told_of(vanishing):
    """The negative control."""
    vanishing(lambda folder: (folder / "note").touch(), checkpoint_interval="1ba")


def test_a_folder_in_the_place_of_the_lock_is_an_error(tmp_path):
    """With the reason and a way out, not a traceback of the operating system's."""
    (tmp_path / ".lock").mkdir()

    with pytest.raises(
        RunFolderError, match=r"lock' is a folder, where a run expects[^$]*run_dir="
    ):
        RunLock(tmp_path).acquire()


@pytest.mark.parametrize("name", ["a" * 5_000, "/".join(["a" * 100] * 60), "a\0b"])
def test_a_folder_with_an_impossible_name_is_an_error(name, make_trainer, tmp_path):
    """The operating system says why."""
    with pytest.raises(EventloopError, match=r"fix"):
        make_trainer(run_dir=tmp_path / name)


def test_frames_of_cplusplus_come_last():
    """What happened and what to do is read first; torch's errors may have a screen of frames."""
    frames = "Exception raised from load at x.cpp:1 (most recent call first):\nframe #0: f + 0x1"

    error = EventloopError(f"it can't be loaded: bad size\n{frames}", fix="give another")

    assert str(error) == f"it can't be loaded: bad size\n  fix  give another\n{frames}"
    assert error.what == "it can't be loaded: bad size"
