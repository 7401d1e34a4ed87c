"""Fixtures: a task that trains in a blink, the command run in process, and parts of a checkpoint."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import eventloop
from eventloop.cli import main

TINY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from eventloop import Task


def task(lr: float = 0.1, hidden_size: int = 4):
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
"""
HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"
PACKAGE = Path(__file__).parents[1]


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


def write_distribution(
    site: Path, name: str, version: str, group: str, target: str, code: str = ""
) -> None:
    """Writes a package as pip leaves it: metadata and, where there is code, one module."""
    if code:
        (site / f"{target.partition(':')[0]}.py").write_text(code)
    info = site / f"eventloop_{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: eventloop-{name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
    (info / "entry_points.txt").write_text(f"[eventloop.{group}]\n{name} = {target}\n")
    (info / "REQUESTED").touch()
    importlib.invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with this one, which may be importable alone in this environment."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    write_distribution(site, "checkpoints", "0.1.0", "commands", "eventloop_checkpoints:run")
    return site


@pytest.fixture
def clean(tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, without EVENTLOOP_ variables; modules are as they were after it."""
    modules = set(sys.modules)
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    work = tmp_path / "work"
    work.mkdir()
    (work / "pyproject.toml").touch()  # the search for one upwards ends here
    monkeypatch.chdir(work)
    yield work
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def tiny(clean: Path) -> Path:
    """The working directory, with `tiny.py` in it."""
    (clean / "tiny.py").write_text(TINY)
    return clean


@pytest.fixture
def install(site: Path) -> Callable[..., None]:
    """Installs an algorithm: `install(name, code, version=...)`."""

    def install(name: str, code: str = HEARS, *, version: str = "1.0") -> None:
        target = f"eventloop_{name.replace('-', '_')}_module:Plugin"
        write_distribution(site, name, version, "algorithms", target, code)

    return install


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `eventloop ...` in process."""

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        status = main(argv)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def run_python(site: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs code in a process of its own, with the packages that these tests run with."""
    folders = [site, PACKAGE / "src", Path(eventloop.__file__).parents[1]]

    def run_python(code: str) -> subprocess.CompletedProcess[str]:
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)

    return run_python


@pytest.fixture
def parts() -> dict[str, Any]:
    """Weights in a flat dict, a nest of everything, and one without tensors; the same each time."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "1.weight": torch.randn(64, 8, generator=generator),
        "1.num_batches": torch.tensor(7),
        "0.bias": torch.randn(3, generator=generator).bfloat16(),
    }
    return {
        "model": weights,
        "optimizers": {"adam": {0: {"step": torch.tensor(3.0)}, 1: (0.9, float("nan"), None)}},
        "clock": {"batch": 3, "generator": [2**64, -0.0, b"\0\xff", "ü\n"]},
    }
