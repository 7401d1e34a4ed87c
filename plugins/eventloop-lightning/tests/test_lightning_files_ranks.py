"""Files of `ModelCheckpoint` on two ranks: those of Lightning's DDP, and a run goes on from each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lit_cases import QUIET, Net, loaders

from eventloop_lightning import Trainer
from eventloop_testing import run_ranks

DDP = {"strategy": "ddp", "devices": 2}


def fit(kind: Any, folder: Path, resume: str | None = None, **more: Any) -> list[list[float]]:
    """Trains on this rank; returns the weights."""
    pl.seed_everything(1 if resume is None else 5, verbose=False)
    often = {"save_top_k": -1, "dirpath": folder}
    saves = [
        ModelCheckpoint(filename="{step}-steps", every_n_train_steps=2, **often),
        ModelCheckpoint(filename="{step}-val", monitor="val_loss", **often),
    ]
    module = Net()
    trainer = kind(**QUIET | {"enable_checkpointing": True}, callbacks=saves, **more)
    trainer.fit(module, *loaders(), ckpt_path=None if resume is None else folder / resume)
    return [one.tolist() for one in module.parameters()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("ours")
    weights, others = run_ranks(fit, Trainer, folder)
    assert weights == others
    return folder, weights


@pytest.mark.nightly
def test_files_are_those_of_lightning_on_two_ranks(whole, tmp_path):
    """One rank writes, and nothing else lies in the folder."""
    folder, weights = whole

    expected, _ = run_ranks(fit, pl.Trainer, tmp_path, **DDP)

    names = {one.name for one in tmp_path.iterdir()}
    assert {one.name for one in folder.iterdir()} == names
    assert len(names) == 7
    assert weights == expected
    for name in names:
        then, now = (torch.load(one / name) for one in (tmp_path, folder))
        assert now.keys() - {"eventloop"} == then.keys()
        assert now["global_step"] == then["global_step"]
        for key, one in then["state_dict"].items():
            assert torch.equal(now["state_dict"][key], one), f"{name}: {key}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["step=4-steps", "step=6-val"])
def test_two_ranks_go_on_from_a_file(name, whole):
    """In mid-epoch and after a validation, with another seed, to the same weights."""
    folder, weights = whole

    resumed = run_ranks(fit, Trainer, folder, f"{name}.ckpt")

    assert resumed == [weights, weights]
