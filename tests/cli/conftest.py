"""Fixtures for the command: a task that trains in a blink, and the command run in process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from eventloop.cli import main

TINY = '''
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task


def task(lr: float = 0.1, hidden_size: int = 4):
    """A tiny classifier.

    Args:
        lr: the learning rate, 100% of it.
        hidden_size: units of the hidden layer.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=4)
    return Task(
        model=torch.nn.Sequential(torch.nn.Linear(3, hidden_size), torch.nn.Linear(hidden_size, 3)),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=loader,
        eval_dataloaders={"test": loader, "valid": loader},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics={"accuracy": MulticlassAccuracy(3)},
        settings={"max_duration": "2ep", "device": "cpu"},
    )
'''


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


@pytest.fixture
def tiny(clean: Path) -> Path:
    """The working directory, with `tiny.py` in it."""
    (clean / "tiny.py").write_text(TINY)
    return clean


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `eventloop ...` in process."""

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        status = main(argv)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags for aa-test and bb-test alone; the plugins of the environment are left out."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    return ("-p", "aa-test", "-p", "bb-test")
