"""Fixtures for tests of commands and of installed packages: `pytest_plugins = ["eventloop_testing.commands"]`.

They have to be requested, because their short names could clash with a project's own fixtures.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TINY = '''
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task


def accuracy(outputs, targets):  # none of torchmetrics, whose import takes long
    return (outputs.argmax(1) == targets).float()


accuracy.higher_is_better = True


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
        metrics={"accuracy": accuracy},
        settings={"max_duration": "2ep", "device": "cpu"},
    )
'''
HEARS = "from eventloop import hookimpl\nclass Plugin:\n    @hookimpl\n    def close(self): pass\n"


class Ran(NamedTuple):
    """The exit status and output of a command."""

    status: int
    out: str
    err: str


def write_distribution(
    site: Path,
    distribution: str,
    entry_points: str,
    *,
    version: str = "1.0",
    requested: bool = True,
    summary: str = "",
) -> None:
    """Writes a package's metadata as pip leaves it.

    Args:
        site: a folder of `sys.path`.
        entry_points: the text of that file, sections with their lines.
        requested: whether it was installed by name.
    """
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        + (f"Summary: {summary}\n" if summary else "")
    )
    (info / "entry_points.txt").write_text(entry_points)
    if requested:
        (info / "REQUESTED").touch()
    importlib.invalidate_caches()


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty working directory, no EVENTLOOP_ variables, and `sys` restored afterwards."""
    modules = set(sys.modules)
    for variable in [name for name in os.environ if name.startswith("EVENTLOOP_")]:
        monkeypatch.delenv(variable)
    work = tmp_path / "work"
    work.mkdir()
    (work / "pyproject.toml").touch()  # ends the upward search for this file here
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield work
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def site(clean: Path, tmp_path: Path) -> Path:
    """A folder of installed packages, first on `sys.path`; empty."""
    site = tmp_path / "site"
    site.mkdir()
    sys.path.insert(0, str(site))
    return site


@pytest.fixture
def install(site: Path) -> Callable[..., None]:
    """Installs a plugin as pip does, with metadata and a module: `install(name, code)`."""

    def install(
        name: str,
        code: str = HEARS,
        *,
        target: str = ":Plugin",
        group: str = "eventloop.algorithms",
        distribution: str = "",
        version: str = "1.0",
        requested: bool = True,
        summary: str = "",
    ) -> None:
        distribution = distribution or f"eventloop-{name}"
        module = f"{distribution.replace('-', '_')}_module"
        (site / f"{module}.py").write_text(code)
        text = f"[{group}]\n{name} = {module}{target}\n"
        metadata = {"version": version, "summary": summary}
        write_distribution(site, distribution, text, requested=requested, **metadata)

    return install


@pytest.fixture
def tiny(clean: Path) -> Path:
    """The working directory, with `tiny.py` in it: a task that trains in milliseconds."""
    (clean / "tiny.py").write_text(TINY)
    return clean


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `eventloop ...` in process: `run("fit", "tiny.py").status`."""
    from eventloop.cli import main

    def run(*argv: str) -> Ran:
        capsys.readouterr()
        status = main(argv)
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Flags that activate only aa-test and bb-test; plugins of the environment stay off."""
    monkeypatch.setenv("EVENTLOOP_DISABLE_PLUGIN_AUTOLOAD", "1")
    return ("-p", "aa-test", "-p", "bb-test")
