"""Makes `hf_cases` importable; without accelerate there is nothing to test here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
if importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def in_silence(quiet_transformers: None) -> None:
    """Each test has a folder of its own, and transformers' log is quiet."""


@pytest.fixture(autouse=True)
def on_the_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `--device` both trainers are there; accelerate asks torch for no device that it doesn't know."""
    if (device := request.config.getoption("--device")) != "cpu":
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{device}:0")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three algorithms are installed, whatever else is."""
    from importlib.metadata import EntryPoint

    from eventloop_transformers import named

    points = {
        "checkpointing": "eventloop_checkpointing:Checkpointing",
        "label-smoothing": "eventloop_label_smoothing:LabelSmoothing",
        "seq-length-warmup": "eventloop_seq_length_warmup:SeqLengthWarmup",
    }

    def entry_points(group: str) -> list[EntryPoint]:
        found = points.items() if group == named.ALGORITHMS else ()
        return [EntryPoint(name, value, group) for name, value in found]

    monkeypatch.setattr(named, "entry_points", entry_points)
