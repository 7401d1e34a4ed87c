"""When checkpoints are saved, which are kept, and what happens where one can't be."""

from __future__ import annotations

import errno
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from eventloop import CheckpointError, RunFolderError, hookimpl
from eventloop.errors import SettingError
from eventloop.files import disk
from eventloop_testing.case import isolated_trainer, tiny_task


class Point(NamedTuple):
    """A tuple with a type of its own."""

    x: int


def saved(folder):
    return sorted(int(path.name[2:]) for path in (folder / "run" / "checkpoints").glob("ba*"))


@pytest.mark.parametrize(
    ("interval", "expected"),
    [("2ba", [0, 2, 4, 6]), ("1ep", [0, 3, 6]), ("8sp", [0, 2, 4, 6]), ("0.5dur", [0, 3, 6])],
)
def test_checkpoints_come_at_the_interval_the_start_and_the_end(tmp_path, interval, expected):
    """In whatever unit; the first shows that saving works before anything was trained."""
    given = {"checkpoint_interval": interval, "checkpoint_keep": None, "max_duration": "2ep"}

    with isolated_trainer(tmp_path, **given) as trainer:
        trainer.fit()

    assert saved(tmp_path) == expected


def test_without_a_run_dir_none_is_saved_unasked(tmp_path, monkeypatch):
    """What is tried out in a notebook leaves nothing behind."""
    monkeypatch.chdir(tmp_path)

    with isolated_trainer(tmp_path, run_dir=None, checkpoint_interval="auto") as trainer:
        trainer.fit()

    assert not (tmp_path / "runs").exists()


def test_a_plugin_may_ask_for_one(tmp_path):
    """Also where none is saved otherwise."""

    class Asks:
        name = "asks"

        @hookimpl
        def batch_end(self, state):
            if state.clock.batch == 2:
                state.request_checkpoint()

    with isolated_trainer(tmp_path, callbacks=[Asks()]) as trainer:
        trainer.fit()

    assert saved(tmp_path) == [2]


def test_the_best_is_saved_when_it_comes_and_kept(tmp_path):
    """It may come between two that are due."""
    given = {"checkpoint_interval": "1ep", "checkpoint_keep": 1, "eval_interval": "1ba"}
    given |= {"checkpoint_best": "test/accuracy", "max_duration": "2ep"}

    chosen = Chooses([0.3, 0.9, 0.5, 0.5, 0.5, 0.5])
    with isolated_trainer(tmp_path, algorithms=[chosen], **given) as trainer:
        trainer.fit()

    assert saved(tmp_path) == [2, 6]


def test_a_metric_without_a_direction_needs_one(tmp_path):
    """To keep the worst would be a bad surprise."""
    task = tiny_task(metrics={"mean": MeanMetric()})

    with pytest.raises(SettingError, match="doesn't say whether higher is better"):
        isolated_trainer(tmp_path, task, checkpoint_best="test/mean")
    isolated_trainer(tmp_path, task, checkpoint_best="max test/mean").close()


class Chooses:
    """An algorithm that says what evaluations find."""

    name = "chooses"

    def __init__(self, values):
        self.values = iter(values)

    @hookimpl
    def eval_end(self, state):
        state.eval_metrics["test"]["accuracy"].fill_(next(self.values))


def test_a_loss_is_best_when_it_is_low(tmp_path):
    """The metrics say which way is up."""
    given = {"checkpoint_best": "test/loss", "checkpoint_keep": 1, "eval_interval": "1ba"}
    given |= {"checkpoint_interval": "1ep", "max_duration": "2ep"}

    with isolated_trainer(tmp_path, tiny_task(metrics=None), **given) as trainer:
        trainer.fit()

    assert saved(tmp_path) == [6]


def test_a_metric_that_nothing_has_is_refused(tmp_path):
    """At the start, with the closest that there is."""
    with pytest.raises(SettingError, match="the closest is 'test/accuracy'"):
        isolated_trainer(tmp_path, checkpoint_best="test/acuracy")


@pytest.fixture
def full_disk(monkeypatch):
    """Lets every write fail, from the moment it is called."""

    def full_disk():
        def write(descriptor, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(disk, "write", write)

    return full_disk


class FillsUp:
    """A callback after which the disk is full."""

    name = "fills-up"

    def __init__(self, full_disk):
        self.full_disk = full_disk

    @hookimpl
    def batch_start(self, state):
        if state.clock.batch == 1:
            self.full_disk()


def test_a_full_disk_stops_the_run_soon_after(tmp_path, full_disk):
    """Hours of training that nothing keeps are worse than none; what is there stays."""
    given = {"checkpoint_interval": "1ba", "max_duration": "5ep"}

    with isolated_trainer(tmp_path, callbacks=[FillsUp(full_disk)], **given) as trainer:
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            trainer.fit()

        assert trainer.state.clock.batch <= 4
    assert "needed" in str(caught.value)
    assert "free" in str(caught.value)
    assert saved(tmp_path)[0] == 0
    assert set(saved(tmp_path)) <= {0, 1}


def test_a_full_disk_may_be_lived_with(tmp_path, full_disk):
    """The next interval tries again."""
    given = {"checkpoint_interval": "1ba", "on_save_error": "continue", "max_duration": "2ep"}

    with isolated_trainer(tmp_path, callbacks=[FillsUp(full_disk)], **given) as trainer:
        with pytest.warns(UserWarning, match="wasn't saved|isn't recorded") as caught:
            trainer.fit()

        told = {str(one.message).partition(":")[0] for one in caught}
        assert told == {
            "a checkpoint wasn't saved, and the run continues",
            "the end of the run isn't recorded",
        }
        assert trainer.state.clock.batch == 6
    assert saved(tmp_path)[0] == 0
    assert set(saved(tmp_path)) <= {0, 1}


def recursive():
    held = {"step": 1}
    held["again"] = held
    return held


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (object, "an object"),
        (lambda: torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.ones(2, device="meta"), "without values"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), "nested"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
        (lambda: Point(1), "Point"),
        (recursive, "levels deep"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_what_a_plugin_cannot_save_is_told_by_its_path(tmp_path, make, what):
    """At the first save, before anything was trained."""

    class Odd:
        name = "odd"

        @hookimpl
        def batch_end(self, state):
            pass

        def state_dict(self):
            return {"held": [make()]}

        def load_state_dict(self, state, version):
            pass

    with isolated_trainer(tmp_path, algorithms=[Odd()], checkpoint_interval="1ep") as trainer:
        with pytest.raises(CheckpointError, match=r"plugins\.odd\.state\.held\[0\]") as caught:
            trainer.fit()

        assert what in str(caught.value)
        assert "fix" in str(caught.value)
        assert trainer.state.clock.batch == 0


def test_a_torch_size_comes_back_as_one(tmp_path):
    """Its methods are what a plugin kept it for; a tuple has none of them."""
    came_back = []

    class Sized:
        name = "sized"

        @hookimpl
        def batch_end(self, state):
            pass

        def state_dict(self):
            return {"shape": torch.Size([2, 3]), "pair": (2, 3)}

        def load_state_dict(self, state, version):
            came_back.extend(state.values())

    for until in ("1ba", "2ba"):
        with isolated_trainer(tmp_path, algorithms=[Sized()], checkpoint_interval="1ba") as trainer:
            trainer.fit(until)

    assert [type(one) for one in came_back] == [torch.Size, tuple]
    assert came_back[0] == torch.Size([2, 3])


def test_parameters_that_no_batch_has_shaped_yet_delay_the_first(tmp_path):
    """Lazy layers have no weights before the first forward pass."""
    task = tiny_task(model=lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)))

    with isolated_trainer(tmp_path, task, checkpoint_interval="1ep") as trainer:
        trainer.fit()

    assert saved(tmp_path) == [3]


def test_a_file_in_the_way_is_named(tmp_path):
    """Free space wouldn't help."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").touch()

    with pytest.raises(RunFolderError, match="checkpoints' is a file") as caught:
        isolated_trainer(tmp_path, checkpoint_interval="1ep")

    assert "free space" not in str(caught.value)
