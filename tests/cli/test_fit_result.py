"""`fit --result`: what came of a run, for programs."""

from __future__ import annotations

import json

import pytest

OFF = ("--no-plugins",)


@pytest.fixture
def result(run, tiny):
    """Trains with `--result`; gives what is in the file."""

    def result(*argv):
        ran = run("fit", "tiny.py", *OFF, "--result", "r.json", *argv)
        assert ran.status == 0, ran.err
        return json.loads((tiny / "r.json").read_text())

    return result


def test_the_result_has_the_last_metrics_and_what_is_better(result):
    """A program that compares runs needs no table to read."""
    found = result("--run-dir", "here")

    assert list(found["metrics"]) == [
        "train/loss",
        "test/accuracy",
        "test/loss",
        "valid/accuracy",
        "valid/loss",
    ]
    assert found["higher_is_better"] == {
        "train/loss": False,
        "test/accuracy": True,
        "test/loss": False,
        "valid/accuracy": True,
        "valid/loss": False,
    }
    assert (found["epoch"], found["batch"], found["sample"]) == (2, 6, 24)
    assert found["step_s"] > 0
    assert found["peak_memory_bytes"] > 10**7
    assert (found["algorithms"], found["stop_reason"]) == ([], None)


def test_a_run_that_is_done_already_has_the_same_result(result):
    """Whoever was interrupted between the last step and the file asks once more."""
    first = result("--run-dir", "here")
    with pytest.warns(UserWarning, match="nothing to train"):
        again = result("--run-dir", "here")

    assert again["metrics"] == first["metrics"]
    assert again["step_s"] is None


def test_a_number_that_is_not_finite_is_null(result, tiny):
    """NaN isn't JSON."""
    with pytest.warns(UserWarning, match="the weights aren't finite"):
        found = result("--task.lr", "1e30", "--on-bad-loss", "ignore")

    assert found["metrics"]["train/loss"] is None


def test_a_dry_run_says_which_metrics_there_are(result):
    """So that a wrong name is found before hours are spent."""
    assert "test/accuracy" in result("--dry-run")["metrics"]
