"""A run that is killed and goes on ends with the bits of one that was not."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from lit_cases import CASES, fitted, told

from eventloop_lightning import Trainer

KILLED = {
    "plain": 7,
    "accumulated": 9,
    "schedule by step": 1,
    "one cycle": 11,
    "plateau by epoch": 7,
    "LBFGS": 7,
    "two optimizers, toggled": 7,
    "two optimizers that share a parameter": 7,
    "on_train_batch_start returns -1": 7,
    "a stream": 9,
    "SWA": 8,
    "SWA without batch norm": 13,
    "WeightAveraging": 7,
    "BackboneFinetuning": 8,
    "EarlyStopping": 8,
    "torchmetrics": 9,
}


class Killed(Exception):
    """Stands for a SIGKILL: nothing after it is done."""


class Kills(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.at:
            raise Killed


def killed_and_resumed(name: str, at: int, folder: Any) -> dict[str, Any]:
    settings = {"run_dir": folder, "checkpoint_interval": "1ba"}
    with pytest.raises(Killed):
        fitted(Trainer, CASES[name], callbacks=[Kills(at)], settings=settings)
    return told(*fitted(Trainer, CASES[name], seed=77, settings=settings))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_in_mid_epoch_ends_with_the_same_bits(name, tmp_path):
    """Sums of `self.log`, metrics, accumulated gradients, averages, frozen layers are kept, too."""
    expected = told(*fitted(Trainer, CASES[name]))

    actual = killed_and_resumed(name, KILLED[name], tmp_path / "run")

    assert actual == expected


@pytest.mark.nightly
@pytest.mark.parametrize("at", [1, 5, 6, 9, 11])
@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_anywhere_ends_with_the_same_bits(name, at, tmp_path):
    """First and last batches of an epoch are where something is begun or ended twice."""
    expected = told(*fitted(Trainer, CASES[name]))

    actual = killed_and_resumed(name, at, tmp_path / "run")

    assert actual == expected
