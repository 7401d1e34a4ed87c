"""Loggers, `ModelCheckpoint`, evaluation and prediction give what they give under Lightning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lit_cases import CASES, Case, Net, by_epoch, fitted, loaders, told

from eventloop import SettingError
from eventloop_lightning import Trainer


class Logs(Net):
    def __init__(self) -> None:
        super().__init__(by_epoch)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("most", loss * 2, on_step=True, on_epoch=True, prog_bar=True, reduce_fx="max")
        self.log_dict({"idx": float(batch_idx), "again": loss})
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


def fitted_with_files(trainer: Any, folder: Path) -> tuple[Any, Any]:
    logs = LambdaCallback(
        on_train_epoch_end=lambda trainer, module: module.log("of_a_callback", 1.0)
    )
    saves = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last=True, save_top_k=2)
    return fitted(
        trainer,
        Case(Logs),
        callbacks=[LearningRateMonitor("step"), logs, Timer("00:01:00:00"), saves],
        logger=[CSVLogger(folder), TensorBoardLogger(folder)],
        log_every_n_steps=2,
        enable_checkpointing=True,
    )


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("theirs")
    return *fitted_with_files(pl.Trainer, folder), folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    folder = tmp_path_factory.mktemp("ours")
    return *fitted_with_files(Trainer, folder), folder


def table_of(folder: Path) -> str:
    return next(folder.rglob("metrics.csv")).read_text()


def test_the_table_of_a_logger_is_equal(theirs, ours):
    """Every number at its step: of steps, epochs, validation, learning rates and callbacks."""
    assert table_of(ours[-1]) == table_of(theirs[-1])
    assert len(table_of(theirs[-1]).splitlines()) > 20
    assert list(ours[-1].rglob("events.out.tfevents.*"))


def test_checkpoints_of_lightning_are_equal(theirs, ours):
    """Other tools load them."""
    names = [{one.name for one in folder.iterdir()} for *_, folder in (theirs, ours)]
    best = [trainer.checkpoint_callback.best_model_path for _, trainer, _ in (theirs, ours)]
    then, now = (torch.load(path, weights_only=False) for path in best)

    files = {"last.ckpt", "epoch=1-step=12.ckpt", "epoch=2-step=18.ckpt"}
    assert names[0] == names[1] == {*files, "lightning_logs"}
    assert now["loops"] == then["loops"]
    assert now.keys() - {"eventloop"} == then.keys()
    assert torch.equal(now["state_dict"]["net.0.weight"], then["state_dict"]["net.0.weight"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["epoch=1-step=12.ckpt", "last.ckpt"])
def test_a_fit_goes_on_from_a_file_exactly(name, ours):
    """In the file is what else is needed."""
    module, _, folder = ours

    resumed, _ = fitted(Trainer, Case(Logs), seed=5, ckpt_path=str(folder / name))

    for one, expected in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, expected)


def test_a_file_without_ours_is_refused(theirs):
    """To begin at its weights and call it resumed would be a lie."""
    path = next(theirs[-1].glob("epoch*.ckpt"))

    with pytest.raises(SettingError, match="was not written by this Trainer"):
        fitted(Trainer, Case(Logs), ckpt_path=str(path))


@pytest.mark.parametrize("method", ["validate", "test"])
def test_evaluation_gives_the_same_numbers(method, theirs, ours):
    """With the weights of the best checkpoint, too."""
    found = [
        getattr(trainer, method)(module, loaders()[1], ckpt_path="best", verbose=False)
        for module, trainer, _ in (theirs, ours)
    ]

    assert found[0] == found[1]
    assert found[0][0]


def test_predictions_are_equal(theirs, ours):
    """By Lightning's own loop."""
    one, other = (trainer.predict(module, loaders()[1]) for module, trainer, _ in (theirs, ours))

    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "16-mixed"}, "precision='16-mixed' can't be honoured"),
        ({"strategy": "fsdp"}, "strategy='fsdp' can't be honoured"),
        ({"accelerator": "tpu"}, "accelerator='tpu' can't be honoured"),
        ({"devices": 2}, "are not the 1 processes"),
        ({"plugins": "ddp"}, "plugins='ddp' can't be honoured"),
        ({"run_dir": "a"}, "has no argument 'run_dir'"),
    ],
)
def test_what_cant_be_honoured_is_an_error(arguments, message):
    """An argument that is ignored in silence makes another run of it."""
    with pytest.raises(SettingError, match=message):
        Trainer(**arguments)


def test_a_fit_goes_on_with_more_epochs(tmp_path):
    """As a run that had them from the beginning, to the bit."""
    expected, _ = fitted(Trainer, CASES["plain"], max_epochs=4)
    saves = [ModelCheckpoint(dirpath=tmp_path, save_last=True)]
    given = {"enable_checkpointing": True}
    fitted(Trainer, CASES["plain"], max_epochs=2, callbacks=saves, **given)

    file = str(tmp_path / "last.ckpt")
    resumed, trainer = fitted(Trainer, CASES["plain"], seed=5, max_epochs=4, ckpt_path=file)

    assert trainer.current_epoch == 4
    for one, other in zip(resumed.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_profiler_is_accepted_with_a_warning():
    """It records what Lightning calls, which isn't the training."""
    with pytest.warns(UserWarning, match="eventloop-profile profiles that"):
        Trainer(profiler="simple")


@pytest.mark.parametrize("trainer", [pl.Trainer, Trainer])
def test_a_second_fit_without_anything_to_do_does_nothing(trainer):
    """Notebooks run a cell twice."""
    module, made = fitted(trainer, CASES["plain"])
    before = [one.clone() for one in module.parameters()]

    made.fit(module, *loaders())

    assert (made.global_step, made.current_epoch) == (18, 3)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["plain", "SWA", "EarlyStopping", "two optimizers, toggled"])
def test_a_second_fit_goes_on(name):
    """With new optimizers and the counts of the first, as under Lightning."""
    found = []
    for kind in (pl.Trainer, Trainer):
        module, trainer = fitted(kind, CASES[name])
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        trainer.fit(module, *loaders())
        found.append(told(module, trainer))

    assert found[0] == found[1]


def test_a_second_fit_with_more_steps_goes_on(tmp_path):
    """In a new epoch, and from its file in another process."""
    found = []
    for kind in (pl.Trainer, Trainer):
        module, trainer = fitted(kind, CASES["plain"], max_epochs=-1, max_steps=8)
        trainer.fit_loop.epoch_loop.max_steps = 17
        saves = ModelCheckpoint(
            tmp_path / kind.__module__, filename="{step}", every_n_train_steps=12
        )
        trainer.callbacks.append(saves)
        trainer.fit(module, *loaders())
        found.append(told(module, trainer))

    file = tmp_path / Trainer.__module__ / "step=12.ckpt"
    resumed = fitted(
        Trainer, CASES["plain"], seed=5, max_epochs=-1, max_steps=17, ckpt_path=str(file)
    )

    assert found[0] == found[1]
    assert told(*resumed) == found[1]


def test_a_second_fit_in_the_folder_of_the_first_is_refused(tmp_path):
    """What is in it would be taken for where the run is."""
    module, trainer = fitted(Trainer, CASES["plain"], settings={"run_dir": tmp_path / "run"})
    trainer.fit_loop.max_epochs = 5

    with pytest.raises(SettingError, match="has fitted already"):
        trainer.fit(module, *loaders())


class Folder(TorchCheckpointIO):
    """Writes a file of another kind: a folder with a part for each key."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        shutil.rmtree(path, ignore_errors=True)
        for key, one in checkpoint.items():
            super().save_checkpoint(one, f"{path}/{key}")

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        return {one.name: torch.load(one) for one in Path(path).iterdir()}

    def remove_checkpoint(self, path):
        shutil.rmtree(path)


@pytest.mark.parametrize("plugin", [Folder, AsyncCheckpointIO])
def test_a_plugin_writes_and_reads_the_files(plugin, tmp_path):
    """What a run needs goes through it, too."""
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
    more = {"enable_checkpointing": True, "plugins": [plugin()]}
    expected = told(*fitted(Trainer, CASES["plain"], callbacks=[saves], **more))

    file = str(tmp_path / "step=10.ckpt")
    resumed = fitted(Trainer, CASES["plain"], seed=5, ckpt_path=file, plugins=plugin())

    assert told(*resumed) == expected
    assert {one.name for one in tmp_path.iterdir()} == {
        "step=5.ckpt",
        "step=10.ckpt",
        "step=15.ckpt",
    }
