"""Fixtures: a task that trains in a blink, algorithms that are installed, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eventloop

TINY = '''
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task


def accuracy(outputs, targets):  # none of torchmetrics, whose import takes long
    return (outputs.argmax(1) == targets).float()


accuracy.higher_is_better = True


def task(lr: float = 0.1):
    """A tiny classifier.

    Args:
        lr: the learning rate.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=4)
    return Task(
        model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)),
        loss=torch.nn.functional.cross_entropy,
        train_dataloader=loader,
        eval_dataloaders={"test": loader},
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr),
        metrics={"accuracy": accuracy},
        settings={"max_duration": "2ep", "device": "cpu"},
    )
'''
Start = Callable[..., subprocess.Popen[str]]


def write_distribution(
    folder: Path, name: str, code: str, group: str = "eventloop.algorithms"
) -> None:
    """Writes a plugin as pip leaves it: metadata and one module."""
    module = f"{name.replace('-', '_')}_module"
    (folder / f"{module}.py").write_text(code)
    info = folder / f"eventloop_{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eventloop-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:Plugin\n")
    (info / "REQUESTED").touch()


@pytest.fixture(scope="session")
def start() -> Start:
    """Starts `eventloop ablate ...` in a folder, whose algorithms are installed."""
    source = Path(eventloop.__file__).parents[1]

    def start(folder: Path, *argv: str) -> subprocess.Popen[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("EVENTLOOP_")}
        environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "eventloop", "ablate", *argv],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def install() -> Callable[..., None]:
    """Installs a plugin into a folder: `install(folder, name, code, group)`."""
    return write_distribution


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the tiny task in it, and nothing installed."""
    folder = tmp_path_factory.mktemp("ablate")
    (folder / "pyproject.toml").touch()  # the search for one upwards ends here
    (folder / "tiny.py").write_text(TINY)
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same as the process's own working directory, without EVENTLOOP_ variables."""
    modules = dict(sys.modules)
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in sys.modules.keys() - modules.keys():
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
