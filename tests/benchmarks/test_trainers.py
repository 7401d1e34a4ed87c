"""The comparison of trainers: the time of a step, and a run that is killed and resumed."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

FOLDER = Path(__file__).parents[2] / "benchmarks" / "trainers"
SCENARIO = "with random augmentation"


@pytest.fixture
def compare(clean, monkeypatch):
    """The module benchmarks/trainers/compare.py."""
    monkeypatch.syspath_prepend(FOLDER)
    known_modules = set(sys.modules)
    yield importlib.import_module("compare")
    for name in sys.modules.keys() - known_modules:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_every_trainer_has_a_module(compare):
    """Each module is named after its trainer, and gets a row of the table."""
    modules = {path.stem for path in FOLDER.glob("with_*.py")} | {compare.BY_HAND}

    assert modules == set(compare.TRAINERS)


def test_a_worker_measures_the_steps_of_its_trainer(compare):
    """Its result is a time in seconds; a step takes less than a minute."""
    with compare.worker_of("by_hand") as worker:
        seconds = worker.request("step_time", model="perceptron", num_steps=3)

    assert 0 < seconds < 60


def test_a_trainer_that_is_not_installed_is_named(compare):
    """The error has the last line that the process wrote."""
    with (
        pytest.raises(compare.WorkerError, match="No module named 'with_nothing'"),
        compare.worker_of("with_nothing"),
    ):
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("augments", [False, True])
@pytest.mark.parametrize(("module", "is_exact"), [("with_eventloop", True), ("by_hand", False)])
def test_only_eventloop_continues_exactly(module, is_exact, augments, compare):
    """The hand-written loop is the control: it saves no random state."""
    outcome = compare.resume(module, augments)

    assert outcome["is_repeatable"]
    assert outcome["is_exact"] == is_exact


def test_the_table_has_the_outcome_of_each_kill(compare):
    """A trainer that isn't installed, or fails to resume, has the reason in its row."""
    exact = {"is_repeatable": True, "is_exact": True}
    results = {
        "steps": {"perceptron": {"by_hand_ms": 1.5, "ratios": {"by_hand": [0.9, 1.0, 1.1]}}},
        "trainers": {
            "by_hand": {
                "name": "hand-written loop",
                "version": "2",
                "shuffled data, dropout": exact,
                SCENARIO: {**exact, "is_exact": False},
            },
            "with_ignite": {"name": "ignite", "problem": "No module named 'ignite'"},
        },
    }
    console = Console(file=io.StringIO(), width=160)

    console.print(compare.table_of(results))

    table = console.file.getvalue()
    assert "1.00 (0.90 to 1.10) of 1.50 ms" in table
    assert "exact" in table
    assert "other weights" in table
    assert "No module named 'ignite'" in table
    assert compare.resume_text({"problem": "no such file"}) == "fails: no such file"
    assert compare.resume_text({"is_repeatable": False}) == "not repeatable"
