"""Algorithms on divided layers: each trains as one process does, or is refused at the start."""

from __future__ import annotations

import pytest
import torch
from tp_cases import LAYOUTS, train

from eventloop import EventloopError
from eventloop_agc import Agc
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_label_smoothing import LabelSmoothing
from eventloop_muon import Muon
from eventloop_sam import Sam
from eventloop_swa import Swa
from eventloop_testing import run_ranks

ROWS = {
    "agc": (lambda: Agc(clip=0.1), {"clip_norm": None}),
    "checkpointing": (Checkpointing, {}),
    "clip_value": (None, {"clip_value": 0.001}),
    "ema": (lambda: Ema(half_life="3ba"), {}),
    "label-smoothing": (LabelSmoothing, {}),
    "muon": (lambda: Muon(lr=2e-3), {}),
    "sam": (Sam, {}),
    "sam, adaptive": (lambda: Sam(adaptive=True, rho=0.5), {}),
    "swa": (lambda: Swa(start="0.5dur"), {}),
}
COLUMNS = ("tp 2 x dp 2", "tp 2 x fsdp 2", "sequence 4")
# `.` ends with the weights of one process; `x` is refused before the first step.
TABLE = {
    "agc            ": ". . .",
    "checkpointing  ": ". . .",
    "clip_value     ": ". . .",
    "ema            ": ". . .",
    "label-smoothing": ". . x",
    "muon           ": ". . .",
    "sam            ": ". . .",
    "sam, adaptive  ": ". . .",
    "swa            ": "x x x",
}
# Torch computes a loss over divided logits without smoothing.
REFUSALS = {"swa": "swa was asked for, but", "label-smoothing": "loss_parallel: the loss does"}
CELLS = [
    pytest.param(name.strip(), column, mark, id=f"{name.strip()}, {column}")
    for name, marks in TABLE.items()
    for column, mark in zip(COLUMNS, marks.split(), strict=True)
]


def fit(folder, name, layout=None, until=None):
    """Trains with an algorithm; returns the weights that are exported."""
    made, settings = ROWS[name]
    plugins = (*(LAYOUTS[layout] if layout else ()), *([made] if made else []))
    return train(folder, plugins, max_duration="960tok", until=until, **settings)[0]


def refused(folder, name, layout):
    """Returns the message of what is raised before the first step."""
    try:
        fit(folder, name, layout, until="1ba")
    except EventloopError as error:
        return str(error)
    return ""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "column", "mark"), CELLS)
def test_an_algorithm_trains_as_in_one_process_or_is_refused(name, column, mark, tmp_path):
    """What computes with a rank's part alone would end elsewhere."""
    if mark == "x":
        for message in run_ranks(refused, tmp_path, name, column, world_size=4):
            assert REFUSALS[name] in message
        return
    expected = fit(tmp_path / "one", name)

    actual, *_ = run_ranks(fit, tmp_path / "ranks", name, column, world_size=4, timeout_s=240)

    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=0, atol=1e-11)
