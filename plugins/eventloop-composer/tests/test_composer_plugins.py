"""Algorithms of eventloop's under Composer's trainer: each trains as one run, or is refused at the start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping
from composer.models import ComposerClassifier
from composer.optim import LinearScheduler
from composer_cases import SEED, ours
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import eventloop
from eventloop import EventloopError
from eventloop_agc import Agc
from eventloop_checkpointing import Checkpointing
from eventloop_composer import Trainer, task
from eventloop_ema import Ema
from eventloop_muon import Muon
from eventloop_sam import Sam
from eventloop_swa import Swa
from eventloop_testing import Dies, differences, last_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS: dict[str, Callable[[], list[object]]] = {
    "none": list,
    "muon": lambda: [Muon()],
    "ema": lambda: [Ema(half_life="2ba")],
    "agc": lambda: [Agc()],
    "sam": lambda: [Sam()],
    "swa": lambda: [Swa(start="0.5dur")],
    "checkpointing": lambda: [Checkpointing()],
    "clip_norm": list,
}
COLUMNS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "microbatches": lambda: {"device_train_microbatch_size": 4},
    "scheduler": lambda: {"schedulers": LinearScheduler(1.0, 0.1)},
    "GradientClipping": lambda: {"algorithms": GradientClipping("norm", 0.5)},
}
# `.` trains, and is resumed to the same bits; `x` is refused before the first step.
TABLE = {
    "muon         ": ". . x .",
    "ema          ": ". . . .",
    "agc          ": ". . . .",
    "sam          ": ". . . .",
    "swa          ": ". . . .",
    "checkpointing": ". . . .",
    "clip_norm    ": ". . . .",
}
CELLS = [
    pytest.param(
        name.strip(),
        column,
        mark,
        marks=[]
        if (name.strip(), column) == ("agc", "plain") or mark == "x"
        else pytest.mark.nightly,
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


def model() -> ComposerClassifier:
    """Layers that repeat, a batch norm, dropout, a parameter of one element."""
    blocks = nn.Sequential(Block(), Block())
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), blocks, Gain(), nn.Linear(8, 3)
    return ComposerClassifier(nn.Sequential(*layers), num_classes=3)


def fit(
    folder: Path, name: str, column: str, batch: int | None = None
) -> tuple[Mapping[str, Tensor], float]:
    """Trains three epochs of six batches; may end in the middle. Returns weights and results."""
    torch.manual_seed(SEED)
    made = model()
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    settings = {"run_dir": folder / "run", "checkpoint_interval": "2ba"}
    trainer = ours(
        model=made,
        train_dataloader=DataLoader(data, 8, shuffle=True),
        eval_dataloader=DataLoader(data, 8),
        optimizers=torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9),
        max_duration="3ep",
        seed=SEED,
        device="cpu",
        progress_bar=False,
        plugins=[*ROWS[name](), Dies(batch, raises=EOFError)],
        settings=settings | ({"clip_norm": 0.1} if name == "clip_norm" else {}),
        **COLUMNS[column](),
    )
    with contextlib.closing(trainer):
        trainer.fit()
        state = trainer.eventloop.state
        return state.model.state_dict(), float(state.eval_metrics["eval"]["CrossEntropy"])


@pytest.mark.parametrize(("name", "column", "mark"), CELLS)
def test_an_algorithm_trains_as_one_run_or_is_refused_at_the_start(name, column, mark, tmp_path):
    """What had no effect, or another one, would be noticed by nobody."""
    if mark == "x":
        with pytest.raises(EventloopError, match=rf"{name}(.|\n)*{column}"):
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
    assert (whole[1] == plain[1]) == (name == "checkpointing")


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


@pytest.mark.parametrize("settings", [{}, {"autoload": True}], ids=str)
def test_an_installed_algorithm_stays_off_and_one_line_says_so(capsys, installed, settings):
    """A step is made, whatever is installed; where all plugins take part it isn't."""
    torch.manual_seed(SEED)
    made = model()
    before = made.module[0].weight.detach().clone()
    data = TensorDataset(torch.rand(8, 4), torch.arange(8) % 3)
    trainer = Trainer(
        model=made,
        train_dataloader=DataLoader(data, 4),
        optimizers=torch.optim.SGD(made.parameters(), lr=0.1),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        settings=settings,
    )
    with contextlib.closing(trainer):
        trainer.fit()

    lines = capsys.readouterr().err.splitlines()
    said = [one for one in lines if one.startswith("eventloop: off, unless passed in plugins")]
    has_moved = not torch.equal(made.module[0].weight, before)
    assert has_moved == any("freezes" in one for one in said) == (not settings)


def test_an_installed_algorithm_stays_off_where_a_model_is_a_task(capsys, installed):
    """In eventloop's own Trainer, too."""
    data = DataLoader(TensorDataset(torch.rand(8, 4), torch.arange(8) % 3), 4)
    made = task(model(), data, progress_bar=False)
    with eventloop.Trainer(made, max_duration="1ba", device="cpu") as trainer:
        trainer.fit()

    assert "freezes" not in [one.name for one in trainer.plugins]
    assert "or named with -p: " in capsys.readouterr().err
