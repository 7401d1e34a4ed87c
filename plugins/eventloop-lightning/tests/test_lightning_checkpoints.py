"""A run goes on from every file that the trainer has written, exactly; hooks are called as under Lightning."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lit_cases import CASES, QUIET, Case, Net, fitted, loaders, told

from eventloop import CheckpointError, ResumeError, SettingError
from eventloop_ema import Ema
from eventloop_lightning import Trainer

SAVES = {"enable_checkpointing": True}


class Counts(Net):
    """Counts its batches, and keeps the count itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = self.num_saved = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1
        with torch.no_grad():  # after ModelCheckpoint has written its file
            self.net[0].weight.mul_(0.999)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_saved += 1
        checkpoint["counted"] = self.num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_batches = checkpoint["counted"]


def every_kind(folder: Path) -> list[ModelCheckpoint]:
    """Returns what writes in the middle of an epoch, after a validation, and at its end."""
    often = {"save_top_k": -1, "dirpath": folder}
    return [
        ModelCheckpoint(filename="{step}-steps", every_n_train_steps=4, **often),
        ModelCheckpoint(filename="{step}-val", monitor="val_loss", **often),
        ModelCheckpoint(filename="{step}-end", save_on_train_epoch_end=True, **often),
    ]


def weights_of(module: Any) -> list[Any]:
    return [one.tolist() for one in module.state_dict().values()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("whole")
    module, trainer = fitted(Trainer, Case(Counts), callbacks=every_kind(folder), **SAVES)
    return module, told(module, trainer), folder


def test_files_and_calls_are_those_of_lightning(whole, tmp_path):
    """`on_save_checkpoint` is called once for each file, and nothing else lies in the folder."""
    module, _, folder = whole

    theirs, _ = fitted(pl.Trainer, Case(Counts), callbacks=every_kind(tmp_path), **SAVES)

    assert {one.name for one in folder.iterdir()} == {one.name for one in tmp_path.iterdir()}
    assert module.num_saved == theirs.num_saved == 10
    assert weights_of(module) == weights_of(theirs)
    for one in tmp_path.iterdir():
        then, now = (torch.load(path) for path in (one, folder / one.name))
        assert now.keys() - {"eventloop"} == then.keys()
        assert all(map(torch.equal, now["state_dict"].values(), then["state_dict"].values()))


@pytest.mark.parametrize("name", ["step=4-steps", "step=8-steps", "step=6-val", "step=12-end"])
def test_a_fit_goes_on_from_each_kind_of_file(name, whole):
    """Also where the module has moved its weights after the file was written."""
    _, expected, folder = whole

    resumed = fitted(Trainer, Case(Counts), seed=5, ckpt_path=str(folder / f"{name}.ckpt"))

    assert told(*resumed) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["plain", "accumulated", "LBFGS", "two optimizers that share a parameter"]
)
def test_a_fit_goes_on_from_a_file_written_after_it(name, tmp_path):
    """`trainer.save_checkpoint` is what people call in the end; with more epochs there is more to do."""
    first = CASES[name]
    _, trainer = fitted(Trainer, first)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")

    kept = torch.load(tmp_path / "mine.ckpt")
    module, resumed = fitted(Trainer, first, seed=5, max_epochs=5, ckpt_path=tmp_path / "mine.ckpt")

    assert kept["eventloop"]["batch"] == 18
    actual = told(module, resumed)
    assert resumed.current_epoch == 5
    assert actual == told(*fitted(Trainer, first, max_epochs=5))


class Fails(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 8:
            raise EOFError


def test_a_fit_goes_on_from_a_file_that_an_exception_left(tmp_path):
    """The batch that failed is trained again."""
    saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(EOFError):
        fitted(Trainer, CASES["plain"], callbacks=[Fails(), saves], **SAVES)

    resumed = fitted(Trainer, CASES["plain"], seed=5, ckpt_path=saves.ckpt_path)

    assert told(*resumed) == told(*fitted(Trainer, CASES["plain"]))


class KeepsADate(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"begun": datetime.date(2026, 1, 1)}


def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start(tmp_path):
    """Not at the first checkpoint; a file of Lightning's, which is pickled, can hold it."""
    run = {"run_dir": tmp_path / "run", "checkpoint_interval": "1ep"}

    with pytest.raises(CheckpointError, match="KeepsADate") as caught:
        fitted(Trainer, CASES["plain"], callbacks=[KeepsADate()], settings=run)
    _, trainer = fitted(Trainer, CASES["plain"], callbacks=[KeepsADate()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    assert "begun" in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_weights_alone_are_refused_at_the_start(tmp_path):
    """No run goes on from them under Lightning, either."""
    saves = ModelCheckpoint(tmp_path, save_weights_only=True, filename="w")
    fitted(Trainer, CASES["plain"], callbacks=[saves], max_epochs=1, **SAVES)

    assert "eventloop" not in torch.load(tmp_path / "w.ckpt")
    with pytest.raises(SettingError, match="has weights alone"):
        fitted(Trainer, CASES["plain"], ckpt_path=str(tmp_path / "w.ckpt"))


def test_what_cant_go_on_is_told_in_words_of_this_trainer(tmp_path):
    """It has no TrainerBuilder and no command line."""
    _, trainer = fitted(Trainer, CASES["plain"], algorithms=[Ema()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")

    with pytest.raises(ResumeError, match="which isn't here") as caught:
        fitted(Trainer, CASES["plain"], ckpt_path=str(tmp_path / "a.ckpt"))

    assert "TrainerBuilder" not in str(caught.value)
    assert "pass the same algorithms=[...]" in caught.value.fix


def test_lightnings_own_trainer_goes_on_from_such_a_file(whole):
    """For it there is one key more, which it doesn't know."""
    *_, folder = whole
    pl.seed_everything(1, verbose=False)
    module = Counts()

    trainer = pl.Trainer(**QUIET)
    trainer.fit(module, *loaders(), ckpt_path=str(folder / "step=6-val.ckpt"))

    assert (trainer.global_step, trainer.current_epoch) == (18, 3)


def test_averages_of_a_callback_are_in_the_file(tmp_path):
    """`EMAWeightAveraging` puts its average in the place of the weights."""
    given = {"max_epochs": 2, "callbacks": [EMAWeightAveraging(decay=0.9)]}
    saves = [ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)]
    case = Case(Net)
    first = {**given, "callbacks": [*given["callbacks"], *saves]}
    expected = told(*fitted(Trainer, case, **first, **SAVES))

    path = str(tmp_path / "step=6.ckpt")
    again = {**given, "callbacks": [EMAWeightAveraging(decay=0.9)]}
    resumed = fitted(Trainer, case, seed=5, ckpt_path=path, **again)

    assert told(*resumed) == expected


class Vocabulary:
    """An object that no checkpoint of a run can hold."""


class AddsAnObject(Counts):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["vocabulary"] = Vocabulary()


def test_an_object_that_on_save_checkpoint_adds_is_named_with_the_way_to_leave_it_out(tmp_path):
    """Whose code it is may be somebody else's."""
    run = {"run_dir": tmp_path / "run", "checkpoint_interval": "1ep"}

    with pytest.raises(CheckpointError) as caught:
        fitted(Trainer, Case(AddsAnObject), settings=run)

    assert "'checkpoint.vocabulary' can't be saved" in str(caught.value)
    assert "on_save_checkpoint of AddsAnObject" in str(caught.value)
    assert "`Trainer(leave_out=['vocabulary'])`" in caught.value.fix


def test_a_key_that_is_left_out_is_in_lightnings_files_alone(tmp_path):
    """The run has checkpoints, and is resumed from them; files are as under Lightning."""
    run = {"run_dir": tmp_path / "run", "checkpoint_interval": "1ba"}
    given = {"settings": run, "leave_out": ["vocabulary"]}
    with pytest.raises(EOFError):
        fitted(Trainer, Case(AddsAnObject), callbacks=[Fails()], **given)

    resumed = fitted(Trainer, Case(AddsAnObject), seed=5, **given)
    resumed[1].save_checkpoint(tmp_path / "mine.ckpt")

    assert told(*resumed) == told(*fitted(Trainer, Case(AddsAnObject)))
    assert type(torch.load(tmp_path / "mine.ckpt", weights_only=False)["vocabulary"]) is Vocabulary


class Shows:
    """Stands for the installed plugin that shows progress."""

    name = "progress"
    shows_progress = True


@pytest.mark.parametrize("is_shown", [True, False])
def test_no_progress_bar_is_shown_where_none_is_wanted(is_shown):
    """The installed plugin took part all the same; what is passed by hand stays."""
    trainer = Trainer(enable_progress_bar=is_shown, logger=False, enable_checkpointing=False)
    passed = Trainer(enable_progress_bar=is_shown, logger=False, watchers=[Shows()])

    assert [one.name for one in trainer._watchers] == ([] if is_shown else ["progress"])
    assert [type(one) for one in passed._watchers] == [Shows]
