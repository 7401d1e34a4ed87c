"""Algorithms on sharded ranks: each trains as one run, or is refused at the start."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from eventloop import EventloopError, Task
from eventloop_agc import Agc
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_fsdp import Fsdp
from eventloop_muon import Muon
from eventloop_sam import Sam
from eventloop_swa import Swa
from eventloop_testing import Dies, differences, isolated_trainer, last_checkpoint, run_ranks

ROWS = {
    "none": list,
    "muon": lambda: [Muon()],
    "ema": lambda: [Ema(half_life="2ba")],
    "agc": lambda: [Agc()],
    "sam": lambda: [Sam()],
    "swa": lambda: [Swa(start="0.5dur")],
    "checkpointing": lambda: [Checkpointing()],
    "clip_norm": list,
}
COLUMNS = {"plain": {}, "meta": {"meta": True}, "offload": {"offload": True}}
# `.` trains, and is resumed to the same bits; `x` is refused before the first step.
TABLE = {
    "muon         ": ". . .",
    "ema          ": ". . .",
    "agc          ": ". . .",
    "sam          ": ". . .",
    "swa          ": "x x x",
    "checkpointing": ". . .",
    "clip_norm    ": ". . .",
}
CELLS = [
    pytest.param(name.strip(), column, mark, id=f"{name.strip()}, {column}")
    for name, marks in TABLE.items()
    for column, mark in zip(COLUMNS, marks.split(), strict=True)
]


class Gain(nn.Module):
    """Scales by one element, which one of two ranks holds."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return inputs * self.gain


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2))


def model():
    blocks = nn.Sequential(Block(), Block())
    return nn.Sequential(nn.Linear(4, 8), blocks, Gain(), nn.Linear(8, 3))


def fit(folder, name, column, batch=None):
    """Trains three epochs of three batches on this rank; gives the loss of the last evaluation."""
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    task = Task(
        model=model,
        loss=cross_entropy,
        train_dataloader=lambda: DataLoader(data, 4, shuffle=True),
        eval_dataloaders=lambda: DataLoader(data, 4),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    algorithms = [Fsdp(**COLUMNS[column]), *ROWS[name](), Dies(batch, raises=EOFError)]
    settings = {"max_duration": "3ep", "checkpoint_interval": "2ba", "microbatch_size": 2}
    settings |= {"clip_norm": 0.1} if name == "clip_norm" else {}
    with (
        contextlib.suppress(EOFError),
        isolated_trainer(folder, task, algorithms=algorithms, **settings) as trainer,
    ):
        return trainer.fit().history[-1]


def fit_all(folder, name, column):
    """Trains without the algorithm, with it, and with it as a run that is stopped twice."""
    plain = fit(folder / "plain", "none", column)
    whole = fit(folder / "whole", name, column)
    for batch in (3, 7, None):
        fit(folder / "killed", name, column, batch)
    return plain, whole


def refused(folder, name, column):
    """Returns the message of what is raised before the first step."""
    try:
        fit(folder, name, column, batch=0)
    except EventloopError as error:
        return str(error)
    return ""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "column", "mark"), CELLS)
def test_an_algorithm_trains_as_one_run_or_is_refused_at_the_start(name, column, mark, tmp_path):
    """What had no effect, or another one, would be noticed by nobody."""
    if mark == "x":
        for message in run_ranks(refused, tmp_path, name, column, timeout_s=120):
            assert name in message
            assert "sharded" in message
        return
    (plain, whole), _ = run_ranks(fit_all, tmp_path, name, column, timeout_s=300)

    checkpoints = [last_checkpoint(tmp_path / one) for one in ("whole", "killed")]
    assert [one.batch for one in checkpoints] == [9, 9]
    assert list(differences(*(one.parts for one in checkpoints))) == []
    keys = [key for key in whole if key.endswith("/loss")]
    assert ([plain[key] for key in keys] == [whole[key] for key in keys]) == (
        name == "checkpointing"
    )
