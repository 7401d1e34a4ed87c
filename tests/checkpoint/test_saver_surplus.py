"""A checkpoint that can't be removed costs space, but neither the run nor its weights."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path

import pytest

from eventloop import Trainer, hookimpl
from eventloop.files import disk
from eventloop_testing import run_ranks, tiny_task

SETTINGS = {"checkpoint_interval": "1ba", "checkpoint_keep": 1, "autoload": False, "device": "cpu"}
WARNING = "a surplus checkpoint couldn't be removed"


class BrokenDisk:
    """Fails to change some paths with EIO, as a broken disk or a network file system does.

    Attributes:
        names: parts of the paths; "" for all of them, None for none.
    """

    def __init__(self, monkeypatch, function):
        self.names: str | None = None
        self._change = getattr(disk, function)
        monkeypatch.setattr(disk, function, self.change)

    def change(self, path, *args):
        # What is removed gets a temporary name first; what is written has one from the start.
        is_removed = Path(path).name.startswith("ba") if args else ".tmp-" in str(path)
        if self.names is not None and self.names in str(path) and is_removed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._change(path, *args)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def trainer_in(folder: Path, duration: str, **settings):
    return Trainer(
        tiny_task(), run_dir=folder, max_duration=duration, resume="auto", **SETTINGS | settings
    )


@pytest.mark.parametrize("function", ["remove_file", "remove_empty"])
@pytest.mark.parametrize("on_error", ["raise", "continue"])
def test_a_run_goes_on_and_removes_it_at_the_next_save(tmp_path, monkeypatch, function, on_error):
    """Whatever happens to a failed save: all that should be saved is."""
    broken = BrokenDisk(monkeypatch, function)
    broken.names = "ba00000001"

    with trainer_in(tmp_path, "4ba", on_save_error=on_error) as trainer:
        with pytest.warns(UserWarning, match=WARNING):
            trainer.fit(until="2ba")
        broken.names = None
        trainer.fit()

    assert names_in(tmp_path) == ["ba00000004"]


def test_the_others_are_removed_though_one_can_not_be(tmp_path, monkeypatch):
    """A folder that stays mustn't keep all that come after it."""
    broken = BrokenDisk(monkeypatch, "rename")
    broken.names = "ba00000001"

    with pytest.warns(UserWarning, match=WARNING), trainer_in(tmp_path, "6ba") as trainer:
        trainer.fit()

    assert names_in(tmp_path) == ["ba00000001", "ba00000006"]


@pytest.mark.parametrize("function", ["rename", "remove_file"])
def test_the_end_of_the_run_tries_again(tmp_path, monkeypatch, function):
    """No save follows the last one."""
    broken = BrokenDisk(monkeypatch, function)
    with trainer_in(tmp_path, "3ba") as trainer:
        broken.names = "ba00000002"
        with pytest.warns(UserWarning, match=WARNING):
            trainer.fit()
        broken.names = None

    assert names_in(tmp_path) == ["ba00000003"]


@pytest.mark.parametrize("function", ["rename", "remove_file"])
@pytest.mark.parametrize("duration", ["3ba", "4ba"])
def test_the_next_start_removes_it(tmp_path, monkeypatch, function, duration):
    """Of a run that is done, too; the disk may have been repaired meanwhile."""
    broken = BrokenDisk(monkeypatch, function)
    broken.names = "ba00000002"
    with pytest.warns(UserWarning, match=WARNING), trainer_in(tmp_path, "3ba") as trainer:
        trainer.fit()
    assert len(names_in(tmp_path)) == 2
    broken.names = None

    with warnings.catch_warnings(), trainer_in(tmp_path, "3ba") as trainer:
        warnings.filterwarnings("ignore", "nothing to train")
        trainer.fit(until=duration)

    assert names_in(tmp_path) == [f"ba0000000{duration[0]}"]


def test_a_start_keeps_the_best_and_what_no_run_resumes_from(tmp_path):
    """A damaged checkpoint stays until the next is saved, for a look at it."""
    settings = {"checkpoint_keep": 3, "eval_interval": "1ba", "checkpoint_best": "test/loss"}
    with trainer_in(tmp_path, "5ba", **settings) as trainer:
        trainer.fit()
    before = names_in(tmp_path)
    damaged = tmp_path / "checkpoints" / before[-2]
    next(damaged.glob("*.safetensors")).write_bytes(b"")

    with warnings.catch_warnings(), trainer_in(tmp_path, "5ba", **settings) as trainer:
        warnings.filterwarnings("ignore", "nothing to train")
        trainer.fit()

    assert names_in(tmp_path) == before


def train_on_broken_disk(folder: Path) -> list[str]:
    """Returns the warnings of a rank whose disk removes nothing."""

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    disk.remove_tree = fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trainer_in(folder, "3ba") as trainer:
            trainer.fit()
    return [str(one.message) for one in caught if WARNING in str(one.message)]


def test_ranks_go_on_and_rank_0_warns(tmp_path):
    """Rank 0 alone removes; the others don't know of it."""
    of_rank_0, of_rank_1 = run_ranks(train_on_broken_disk, tmp_path)

    assert of_rank_0
    assert of_rank_1 == []
    assert (tmp_path / "checkpoints" / "ba00000003").is_dir()


def test_a_fit_after_an_exception_waits_for_what_the_first_still_removes(tmp_path, monkeypatch):
    """Two that remove the same checkpoint are in each other's way."""
    rename, begun, next_fit = disk.rename, threading.Event(), threading.Event()

    def slow_rename(path, target):
        if Path(path).name.startswith("ba") and not begun.is_set():
            begun.set()
            next_fit.wait(timeout=1.0)
        rename(path, target)

    class FailsOnce:
        has_failed = False

        @hookimpl
        def before_forward(self, state):
            if self.has_failed:
                next_fit.set()
            elif state.clock.batch == 1:
                self.has_failed = True
                assert begun.wait(timeout=60)
                raise OSError("a batch")

    monkeypatch.setattr(disk, "rename", slow_rename)
    trainer = trainer_in(tmp_path, "4ba", callbacks=[FailsOnce()])
    with trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OSError, match="a batch"):
            trainer.fit()
        trainer.fit()

    assert names_in(tmp_path) == ["ba00000004"]
