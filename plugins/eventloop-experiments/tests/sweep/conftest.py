"""Fixtures: a task that trains in a blink, in the working directory of the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TINY = '''
import time
from pathlib import Path

import torch
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task, schedules


STARTED = [0]


class Batches(list):
    """Stands still after some epochs while there is a file `hold`."""

    def __iter__(self):
        while Path("hold").exists() and STARTED[0] > 2:
            time.sleep(0.02)
        STARTED[0] += 1
        return super().__iter__()


def task(lr: float = 0.1, width: int = 4, kind: str = "plain", betas: list[int] = [1]):
    """A tiny classifier.

    Args:
        lr: the learning rate.
        width: of the hidden layer.
        kind: says nothing.
        betas: neither do they.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 4, 3, generator=generator)
    batches = [(one, one.argmax(1)) for one in inputs]
    return Task(
        model=torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 3)),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=Batches(batches),
        eval_dataloaders={"test": batches},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics={"accuracy": MulticlassAccuracy(3)},
        settings={"max_duration": "4ep", "device": "cpu"},
    )
'''


@pytest.fixture(scope="session")
def tiny_text() -> str:
    """The tiny task."""
    return TINY


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The process's working directory, with the tiny task in it and no EVENTLOOP_ variables."""
    modules = dict(sys.modules)
    for name in os.environ:
        if name.startswith(("EVENTLOOP_", "OPTUNA_")):
            monkeypatch.delenv(name)
    (tmp_path / "pyproject.toml").touch()  # the search for one upwards ends here
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
