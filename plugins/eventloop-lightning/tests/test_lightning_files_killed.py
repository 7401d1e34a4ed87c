"""Files of Lightning's after kills: those of a run in one go, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit_cases import QUIET, Net, loaders

from eventloop_lightning import Trainer
from eventloop_testing import Dies, fit_and_die


class Logs(Net):
    """Logs a name that is new in the second epoch, and loses the best checkpoint in the third."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch:
            self.log("late", float(self.global_step))
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("score", float([1, 3, 2, 4][self.current_epoch]))


def fit(folder: Path, batch: int | None, version: str | None = None, dirpath: Any = None) -> None:
    """Trains four epochs of six batches, saving every second; may die."""
    pl.seed_everything(1, verbose=False)
    given = {"max_epochs": 4, "log_every_n_steps": 1, "enable_checkpointing": True}
    saves = [
        ModelCheckpoint(dirpath, monitor="score", mode="max", save_top_k=2, save_last=True),
        ModelCheckpoint(dirpath, filename="{step}-often", every_n_train_steps=3, save_top_k=-1),
    ]
    settings = {"autoload": False, "run_dir": folder / "run", "checkpoint_interval": "4ba"}
    logger = CSVLogger(folder / "logs", version=version)
    trainer = Trainer(
        **QUIET | given | {"logger": logger},
        callbacks=saves,
        algorithms=[Dies(batch)],
        settings=settings,
    )
    trainer.fit(Logs(), *loaders())


def files_of(folder: Path) -> dict[str, str]:
    """Returns what is in the folder of the logs: tables with their text."""
    paths = [one for one in (folder / "logs").rglob("*") if ".eventloop/" not in str(one)]
    return {
        str(one.relative_to(folder)): one.read_text() if one.suffix == ".csv" else ""
        for one in paths
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("version", "kills"), [(None, (2, 7, 14)), ("mine", (13, 22))], ids=str)
def test_killed_and_resumed_a_run_has_the_files_of_one_in_one_go(tmp_path, version, kills):
    """Rows that were lost or written twice, and checkpoints of batches that are trained again."""
    fit(tmp_path / "whole", None, version)
    expected = files_of(tmp_path / "whole")

    for batch in kills:
        fit_and_die(fit, tmp_path / "killed", batch, version)
    fit(tmp_path / "killed", None, version)

    actual = files_of(tmp_path / "killed")
    assert actual.keys() == expected.keys()
    assert actual == expected
    assert sum("often.ckpt" in one and ".eventloop" not in one for one in actual) == 8


def test_files_of_others_stay(tmp_path):
    """Only what the run itself wrote after its checkpoint is taken back."""
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("epoch=7-step=9.ckpt", "notes.txt"):
        (saved / name).touch()
    fit_and_die(fit, tmp_path, 7, None, saved)

    fit(tmp_path, None, None, saved)

    assert {"epoch=7-step=9.ckpt", "notes.txt"} < {one.name for one in saved.iterdir()}
