"""Algorithms of eventloop's under Lightning: each trains as one run, or is refused at the start."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lit_cases import DATA, QUIET, Case, Measures, Moves, Net, fitted, loaders, on_the_device, told
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader

import eventloop
import eventloop_lightning
from eventloop import EventloopError
from eventloop.cli import main
from eventloop_agc import Agc
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_muon import Muon
from eventloop_sam import Sam
from eventloop_swa import Swa
from eventloop_testing import Dies, differences, isolated_trainer, last_checkpoint

ROWS = {
    "muon": [Muon],
    "ema": [lambda: Ema(half_life="2ba")],
    "agc": [Agc],
    "sam": [Sam],
    "swa": [lambda: Swa(start="0.5dur")],
    "checkpointing": [Checkpointing],
    "clip_norm": [],
}
COLUMNS = ("automatic", "accumulated", "clip_norm", "own clipping", "manual")
# `.` trains, and is resumed to the same bits; `x` is refused before the first step.
TABLE = {
    "muon         ": "x x x x x",
    "ema          ": ". . . . .",
    "agc          ": ". x x x x",
    "sam          ": ". x . . x",
    "swa          ": ". . . . x",
    "checkpointing": ". . . . .",
    "clip_norm    ": ". . . . x",
}
QUICK = [("agc", "automatic")]
CELLS = [
    pytest.param(
        name.strip(),
        column,
        mark,
        marks=[] if mark == "x" or (name.strip(), column) in QUICK else pytest.mark.nightly,
        id=f"{name.strip()}, {column}",
    )
    for name, marks in TABLE.items()
    for column, mark in zip(COLUMNS, marks.split(), strict=True)
]


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.gain


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))


class Blocks(pl.LightningModule):
    """Layers that repeat, a batch norm, dropout, a parameter of one element; and no `forward`."""

    def __init__(self) -> None:
        super().__init__()
        first, blocks = nn.Linear(4, 8), nn.Sequential(Block(), Block())
        self.net = nn.Sequential(first, nn.BatchNorm1d(8), blocks, Gain(), nn.Linear(8, 1))
        self.num_announced = 0

    def training_step(self, batch, batch_idx):
        loss = mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        self.num_announced += 1

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.05)

    def train_dataloader(self):
        return DataLoader(DATA, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(DATA, 10)


class OwnClipping(Blocks):
    def configure_gradient_clipping(self, optimizer, **given):
        nn.utils.clip_grad_norm_(self.parameters(), 0.2)


class Manual(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer)
        optimizer.step()


MODULES = {"own clipping": OwnClipping, "manual": Manual}


def fit(
    folder: Path, name: str, column: str, batch: int | None = None
) -> tuple[Mapping[str, Tensor], Tensor]:
    """Trains three epochs of six batches; may end in the middle. Returns weights and results."""
    accumulates = {"accumulate_grad_batches": 2} if column == "accumulated" else {}
    task = eventloop_lightning.task(MODULES.get(column, Blocks), **accumulates)
    given: dict[str, Any] = {"clip_norm": 0.1} if "clip_norm" in (name, column) else {}
    algorithms = [*(make() for make in ROWS.get(name, [])), Dies(batch, raises=EOFError)]
    with isolated_trainer(
        folder,
        task,
        algorithms=algorithms,
        max_duration="3ep",
        eval_interval="1ep",
        checkpoint_interval="2ba",
        **given,
    ) as trainer:
        trainer.fit()
        assert trainer.state.model.num_announced or column == "manual"
    return trainer.state.model.state_dict(), trainer.state.eval_metrics["val"]["val_loss"]


@pytest.mark.parametrize(("name", "column", "mark"), CELLS)
def test_an_algorithm_trains_as_one_run_or_is_refused_at_the_start(name, column, mark, tmp_path):
    """What had no effect, or another one, would be noticed by nobody."""
    if mark == "x":
        words = rf"{name}(.|\n)*(LightningModule|task|clip_norm)"
        with pytest.raises(EventloopError, match=words):
            fit(tmp_path, name, column, batch=0)
        return
    plain = fit(tmp_path / "plain", "none", column)
    whole = fit(tmp_path / "whole", name, column)
    for batch in (3, 9, 15):
        with contextlib.suppress(EOFError):
            fit(tmp_path / "killed", name, column, batch)
    fit(tmp_path / "killed", name, column)

    checkpoints = [last_checkpoint(tmp_path / one) for one in ("whole", "killed")]
    assert [one.batch for one in checkpoints] == [18, 18]
    assert list(differences(*(one.parts for one in checkpoints))) == []
    assert math.isfinite(whole[1])
    if name not in ("checkpointing", "clip_norm") or column in ("automatic", "accumulated"):
        assert (whole[1] == plain[1]) == (name == "checkpointing")


class Watches(pl.Callback):
    """Keeps the first weights at the end of each epoch, and as validation sees them."""

    def __init__(self) -> None:
        self.trained: list[Tensor] = []
        self.seen: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.trained.append(module.net[0].weight.detach().cpu().clone())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(module.net[0].weight.detach().cpu().clone())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("module", [Net, Measures, Moves])
def test_swa_averages_a_module_without_forward_and_training_does_not_notice(module, tmp_path):
    """Its batch norms see the training step, whose numbers, metrics and draws are forgotten."""
    trainer = eventloop_lightning.Trainer
    case = Case(module, arguments={"max_epochs": 4, "num_sanity_val_steps": 0})
    expected = told(*fitted(trainer, case))
    watches = Watches()

    averaged = fitted(trainer, case, callbacks=[watches], algorithms=[Swa(start="0.5dur")])

    mean = (watches.trained[1] + watches.trained[2]) / 2
    torch.testing.assert_close(watches.seen[3], mean)
    assert torch.equal(watches.seen[1], watches.trained[1])
    actual = told(*averaged)
    averaged[1].save_checkpoint(tmp_path / "a.ckpt")
    kept = torch.load(tmp_path / "a.ckpt")
    assert torch.equal(kept["state_dict"]["net.0.weight"], watches.seen[3])
    trained = kept["eventloop"]["parts"]["model"]
    actual |= {f"weights.{name}": one.tolist() for name, one in trained.items()}
    assert {key for key in expected if actual[key] != expected[key]} <= {
        "metrics.val_loss",
        "metrics.val_error",
    }


FREEZES = """
from eventloop import hookimpl


class Freezes:
    @hookimpl
    def should_skip_step(self, state):
        return True
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm is installed that lets no step be made."""
    folder = tmp_path / "site"
    (folder / "freezes-1.0.dist-info").mkdir(parents=True)
    (folder / "freezes.py").write_text(FREEZES)
    (folder / "freezes-1.0.dist-info" / "METADATA").write_text("Name: freezes\nVersion: 1.0\n")
    points = "[eventloop.algorithms]\nfreezes = freezes:Freezes\n"
    (folder / "freezes-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(folder)


def weights_under(trainer: type[pl.Trainer], **more: Any) -> list[Any]:
    pl.seed_everything(1, verbose=False)
    module = Net()
    on_the_device(trainer(**QUIET, **more)).fit(module, *loaders())
    return [one.tolist() for one in module.state_dict().values()]


@pytest.mark.parametrize("settings", [{}, {"autoload": True}], ids=str)
def test_an_installed_algorithm_stays_off_and_one_line_says_so(capsys, installed, settings):
    """The weights are Lightning's, whatever is installed; where all plugins take part they aren't."""
    expected = weights_under(pl.Trainer)

    found = weights_under(eventloop_lightning.Trainer, settings=settings)

    lines = capsys.readouterr().err.splitlines()
    said = [one for one in lines if one.startswith("eventloop: off, unless passed in algorithms")]
    assert (found == expected) == any("freezes" in one for one in said) == (not settings)


@pytest.mark.parametrize(("more", "is_off"), [((), True), (("-p", "freezes"), False)], ids=str)
def test_an_installed_algorithm_stays_off_in_the_command(capsys, installed, more, is_off):
    """Unless the command line names it."""
    options = ("--task.module", f"{__name__}:Blocks", "--max-duration", "1ba")

    assert main(["fit", "eventloop_lightning", *options, *more]) == 0

    said = capsys.readouterr()
    line = "eventloop: off, unless passed in algorithms=[...], or named with -p: "
    assert any("freezes" in one for one in said.err.splitlines() if line in one) == is_off
    assert "freezes" in said.out


def test_an_installed_algorithm_stays_off_in_a_script(capsys, installed):
    """A task of Lightning's in eventloop's own Trainer."""
    with eventloop.Trainer(eventloop_lightning.task(Blocks), max_duration="1ba") as trainer:
        trainer.fit()

    assert "freezes" not in [one.name for one in trainer.plugins]
    assert "freezes" in capsys.readouterr().err
