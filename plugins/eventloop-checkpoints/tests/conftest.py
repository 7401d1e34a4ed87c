"""Fixtures: this package, installed or not, code in a process of its own, parts of a checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eventloop
from eventloop_testing.commands import write_distribution

PACKAGE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_package(site: Path) -> None:
    """Has `eventloop` find the command of this package, which may only be importable here."""
    text = "[eventloop.commands]\ncheckpoints = eventloop_checkpoints:run\n"
    write_distribution(site, "eventloop-checkpoints", text, version="0.1.0")


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
