"""A LightningModule as a task: on the command line, in a script, and on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lit_cases import DATA, QUIET, Case, Gan, Net, fitted
from torch.utils.data import DataLoader

import eventloop_lightning
from eventloop import Moment, SettingError, Trainer, hookimpl
from eventloop.cli import main
from eventloop_ema import Ema
from eventloop_testing import run_ranks

MODULE = """
import lightning.pytorch as pl
from lit_cases import DATA, Net
from torch.utils.data import DataLoader


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(DATA, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(DATA, 10)
"""


class WithData(Net):
    def train_dataloader(self):
        return DataLoader(DATA, 11, shuffle=True)

    def val_dataloader(self):
        return DataLoader(DATA, 11)


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Path("of_a_reader.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_a_reader", raising=False)
    options = ("--task.module", "of_a_reader:Net", "--task.data", "of_a_reader:Data")
    return ["fit", "eventloop_lightning", *options, "--autoload", "false"]


def test_a_module_is_trained_by_the_command(named, capsys):
    """As any other task is, with its numbers in the last line."""
    status = main([*named, "--max-duration", "2ep", "--run-dir", "run"])

    assert status == 0
    assert "2 epochs, 12 batches" in capsys.readouterr().out
    assert Path("run/manifest.json").is_file()


def test_a_run_of_the_command_goes_on(named, capsys):
    """The task is found again by its options."""
    main([*named, "--max-duration", "2ep", "--run-dir", "run"])
    capsys.readouterr()

    status = main([*named, "--max-duration", "2ep", "--run-dir", "run"])

    assert status == 0
    assert "resumed: run/checkpoints/ba00000012, epoch 2, batch 12" in capsys.readouterr().out


def test_a_task_in_a_script_sees_its_settings():
    """`clip_norm` is what the module's clipping gets, `eval_interval` when it validates."""
    seen = []

    class Clips(WithData):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, **kwargs):
            seen.append(gradient_clip_val)
            super().configure_gradient_clipping(optimizer, gradient_clip_val, **kwargs)

    settings = {"clip_norm": 0.5, "max_duration": "2ep", "eval_interval": "2ep"}
    with Trainer(eventloop_lightning.task(Clips), autoload=False, **settings) as trainer:
        result = trainer.fit()

    assert seen == [0.5] * 8
    assert set(result.metrics["val"]) == {"val_loss"}


def test_a_plugin_of_ours_takes_part():
    """Validation sees its average, training doesn't."""
    case = {"settings": {"autoload": False}, **QUIET}
    pl.seed_everything(1, verbose=False)
    trainer = eventloop_lightning.Trainer(algorithms=[Ema(decay=0.9)], **case)
    trainer.fit(WithData())

    _, other = fitted(eventloop_lightning.Trainer, Case(WithData, lambda: (None, None)))

    trainer.save_checkpoint("now.ckpt")
    other.save_checkpoint("alone.ckpt")
    trained, alone = (
        torch.load(name)["eventloop"]["parts"]["model"] for name in ("now.ckpt", "alone.ckpt")
    )
    assert all(torch.equal(trained[name], one) for name, one in alone.items())
    assert trainer.callback_metrics["loss"] == other.callback_metrics["loss"]
    assert trainer.callback_metrics["val_loss"] != other.callback_metrics["val_loss"]


class Hears:
    """A logger of eventloop's."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}

    @hookimpl
    def log(self, numbers: dict[str, float], at: Moment) -> None:
        for name in numbers:
            self.heard.setdefault(name, []).append(at.batch)


def test_what_a_module_logs_reaches_loggers_of_ours():
    """At the batches at which Lightning's loggers would get it."""
    hears = Hears()

    fitted(eventloop_lightning.Trainer, Case(Net), watchers=[hears], log_every_n_steps=4)

    assert hears.heard["loss_step"] == [4, 8, 12, 16]
    assert hears.heard["loss_epoch"] == hears.heard["val_loss"] == [6, 12, 18]


def trained(precision: str = "fp32") -> dict[str, list[float]]:
    torch.manual_seed(0)
    task = eventloop_lightning.task(WithData)
    options = {"max_duration": "2ep", "autoload": False, "precision": precision, "device": "cpu"}
    with Trainer(task, **options) as trainer:
        trainer.fit()
        return {name: one.tolist() for name, one in trainer.state.model.named_parameters()}


def test_two_ranks_end_with_the_same_weights():
    """Gradients are averaged, and each rank sees its half of the samples."""
    one, other = run_ranks(trained)

    assert one == other
    assert one != trained()


class GanWithData(Gan):
    def train_dataloader(self):
        return DataLoader(DATA, 11, shuffle=True)


def trained_by_hand() -> dict[str, list[float]]:
    case = Case(GanWithData, lambda: (None, None))
    module, _ = fitted(eventloop_lightning.Trainer, case, max_epochs=2)
    return {name: one.tolist() for name, one in module.named_parameters()}


def test_two_ranks_end_with_the_same_weights_by_hand():
    """In manual optimization, under the trainer: each backward averages what it has added."""
    one, other = run_ranks(trained_by_hand)

    assert one == other
    assert one != trained_by_hand()


def test_bf16_trains_otherwise():
    """Under the command's precision, by Lightning's own plugin."""
    assert trained("bf16") != trained()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "precision fp16 scales a loss"),
        ({"compile": True}, "compile has no effect"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "can't both be"),
    ],
)
def test_a_setting_without_effect_is_an_error(settings, message):
    """It would be read in the manifest as if it had one."""
    options = {"max_duration": "1ep", "autoload": False, "device": "cpu", **settings}

    with pytest.raises(SettingError, match=message):
        Trainer(eventloop_lightning.task(WithData), **options)


def test_a_setting_that_is_an_argument_is_an_error():
    """Two words for one thing could say two things."""
    with pytest.raises(SettingError, match="is gradient_clip_val of this trainer"):
        fitted(eventloop_lightning.Trainer, Case(Net), settings={"clip_norm": 1.0})
