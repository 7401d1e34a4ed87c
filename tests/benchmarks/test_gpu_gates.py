"""The gates of a GPU run anywhere, on tiny networks; a number that falls short of its bar is named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu_gates(clean, monkeypatch):
    """The module benchmarks/gpu_gates.py."""
    monkeypatch.syspath_prepend(PATH)
    return importlib.import_module("gpu_gates")


@pytest.mark.parametrize(
    ("bar", "holds"),
    [({}, None), ({"most": 1.0}, True), ({"most": 0.9}, False), ({"least": 1.1}, False)],
)
def test_a_number_is_held_to_its_bar(bar, holds, gpu_gates):
    """One without a bar is told beside the others."""
    assert gpu_gates.Row("gate", "what", 1.0, **bar).holds is holds


@pytest.mark.nightly
def test_gates_are_measured_and_written_with_the_machine(gpu_gates, tmp_path, capsys):
    """Of two of them, on the CPU, the network that is asked for."""
    gates = ["eager", "checkpoints", "--workload", "gpt2", "--device", "cpu"]

    gpu_gates.main([*gates, "--steps", "1", "--turns", "2", "--json", str(tmp_path / "gates.json")])

    told = json.loads((tmp_path / "gates.json").read_text())
    assert told["machine"]["torch"] == torch.__version__
    assert {row["gate"] for row in told["rows"]} == {"eager", "checkpoints"}
    assert all(row["what"].startswith("gpt2") for row in told["rows"])
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert "these numbers mean nothing" in printed.out


@pytest.mark.nightly
def test_a_gate_that_fails_leaves_the_others(gpu_gates, monkeypatch, tmp_path, capsys):
    """It is told, and the next one is measured."""

    def broken(bench):
        yield gpu_gates.Row("broken", "first", 1.0)
        raise ValueError("no kernel")

    monkeypatch.setitem(gpu_gates.GATES, "inputs", broken)

    gpu_gates.main(["inputs", "jitter", "--device", "cpu", "--json", str(tmp_path / "gates.json")])

    told = json.loads((tmp_path / "gates.json").read_text())
    assert [row["gate"] for row in told["rows"]] == ["broken", "jitter", "jitter"]
    assert "no kernel" in capsys.readouterr().err
