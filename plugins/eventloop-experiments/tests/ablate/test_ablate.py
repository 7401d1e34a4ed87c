"""`eventloop ablate`: runs with and without algorithms, side by side, and the table of them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time

import pytest

from eventloop_experiments.ablate import run

NUDGE = """
from eventloop import hookimpl


class Plugin:
    def __init__(self, *, by: float = 0.0) -> None:
        self.by = by

    @hookimpl
    def batch_end(self, state):
        print("nudged", self.by)
        for param in state.model.parameters():
            param.data.add_(self.by)
"""
SHAKY = """
from pathlib import Path

from eventloop import hookimpl


class Plugin:
    @hookimpl
    def batch_end(self, state):
        if Path("broken").exists() and state.clock.batch == 5:
            raise LookupError("nothing found")
"""


FLAGS = ("tiny.py", "-p", "nudge", "-p", "shaky", "--nudge.by", "0.3", "--run-dir", "here")


@pytest.fixture(scope="module")
def broken(folder, install, start):
    """An ablation of one seed in which one of the algorithms fails; then that is fixed."""
    install(folder, "nudge", NUDGE)
    install(folder, "shaky", SHAKY)
    (folder / "broken").touch()
    first = start(folder, *FLAGS, "--seeds", "1")
    told = first.communicate(timeout=300)
    (folder / "broken").unlink()
    kept = folder / "here" / "without-shaky" / "seed-0.json"
    return first.returncode, *told, kept.stat().st_mtime_ns


@pytest.fixture(scope="module")
def mended(folder, broken, start):
    """The same ablation, gone on with when the algorithm was fixed."""
    second = start(folder, *FLAGS, "--seeds", "1", "--json", "--plot", "table.png")
    out, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    return json.loads(out), err


@pytest.mark.nightly
def test_a_run_that_fails_is_a_row_with_its_reason(broken):
    """The others go on, and the exit status tells a script."""
    status, out, err, _ = broken

    assert (status, err) == (1, "")
    assert re.search(r"^all +failed", out, re.MULTILINE)
    assert re.search(r"^without nudge +failed", out, re.MULTILINE)
    assert re.search(r"^none +\d\.\d+ .* ms +\d+ MB$", out, re.MULTILINE)
    assert re.search(r"^without shaky +\d\.\d+ .* ms +\d+ MB$", out, re.MULTILINE)
    assert re.search(r"^failed: all, seed 0: LookupError: nothing found; .*here/all/", out, re.M)


UNMEASURED = """
import torch

from eventloop import Task

task = Task(
    model=lambda: torch.nn.Linear(3, 3),
    loss=torch.nn.functional.cross_entropy,
    train_dataloader=[(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))] * 3,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    settings={"max_duration": "2ep", "device": "cpu"},
)
"""


@pytest.mark.nightly
def test_what_runs_say_themselves_is_in_their_logs(tiny, install, monkeypatch, capfd):
    """Progress bars of several runs would garble each other; without metrics torchmetrics isn't imported."""
    install(tiny, "nudge", NUDGE)
    (tiny / "bare.py").write_text(UNMEASURED)
    flags = ("-p", "nudge", "--nudge.by", "0.3", "--run-dir", "here", "--seeds", "1",
             "--metric", "min train/loss")  # fmt: skip

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))

    status = run(["bare.py", *flags])

    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    assert re.findall(r"^(none|nudge) +\d.*MB", out, re.M) == ["none", "nudge"]
    assert "nudged" not in out
    assert "nudged 0.3" in (tiny / "here" / "nudge" / "seed-0.log").read_text()


@pytest.mark.nightly
def test_an_ablation_goes_on_where_it_was(folder, broken, mended):
    """What is done is read, what isn't is resumed."""
    _, _, _, written_at = broken
    _, err = mended
    kept = folder / "here" / "without-shaky" / "seed-0.json"

    assert kept.stat().st_mtime_ns == written_at
    assert "resumed: here/all/seed-0/checkpoints" in (folder / "here/all/seed-0.log").read_text()
    assert "resumed: 2 of 4 runs are done" in err


@pytest.mark.nightly
def test_rows_differ_by_the_algorithms_that_are_off(folder, mended):
    """Each row is what `fit` would be with these algorithms, and with no others."""
    content, _ = mended
    rows = {row["name"]: row for row in content["rows"]}

    assert {name: row["algorithms"] for name, row in rows.items()} == {
        "none": [],
        "all": ["nudge", "shaky"],
        "without nudge": ["shaky"],
        "without shaky": ["nudge"],
    }
    for name, row in rows.items():
        result = folder / "here" / name.replace(" ", "-") / "seed-0.json"
        assert json.loads(result.read_text())["algorithms"] == row["algorithms"]
    # One of them does nothing but fail, the other moves the weights.
    assert values(rows["without nudge"]) == values(rows["none"])
    assert values(rows["without shaky"]) == values(rows["all"]) != values(rows["none"])


def values(row):
    return [run["value"] for run in row["runs"]]


@pytest.mark.nightly
def test_differences_are_to_none_and_to_all(mended):
    """What one algorithm is worth alone isn't what it adds to the others."""
    content, _ = mended
    rows = {row["name"]: row for row in content["rows"]}

    assert (content["metric"], content["higher_is_better"]) == ("test/accuracy", True)
    assert content["seeds"] == [0]
    assert list(rows["none"]["against"]) == ["all"]
    assert list(rows["all"]["against"]) == ["none"]
    assert rows["without nudge"]["against"]["none"]["mean"] == 0
    mean = rows["all"]["mean"] - rows["none"]["mean"]
    assert rows["all"]["against"]["none"]["mean"] == pytest.approx(mean)


@pytest.mark.nightly
def test_the_picture_is_drawn(folder, mended):
    """A README shows it."""
    assert (folder / "table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_what_changed_since_it_was_begun_is_refused(folder, broken, start):
    """Rows of one table must be comparable."""
    changed = [one.replace("0.3", "0.4") for one in FLAGS]

    process = start(folder, *changed, "--task.lr", "0.2")
    _, err = process.communicate(timeout=300)

    assert process.returncode == 2
    assert err.startswith("ResumeError: the ablation in here was begun with another configuration")
    assert "nudge.by: 0.3 -> 0.4" in err
    assert "task.options.lr: 0.1 -> 0.2" in err


@pytest.mark.nightly
def test_an_ablation_that_is_interrupted_saves_and_says_how_to_go_on(folder, broken, start):
    """Ctrl-C at the terminal reaches the runs, too, each of which saves a checkpoint.

    Until then it has its folder to itself: the runs of two would be in each other's way.
    """
    argv = ("tiny.py", "-p", "nudge", "--seeds", "1", "--max-duration", "1000000ep",
            "--run-dir", "endless", "--eval-interval", "none", "--checkpoint-interval", "none",
            "--jobs", "1", "--metric", "min train/loss")  # fmt: skip
    process = start(folder, *argv)
    log = folder / "endless" / "none" / "seed-0.log"
    deadline = time.monotonic() + 300
    while process.poll() is None and not (log.exists() and "callbacks:" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)

    second = start(folder, *argv)
    _, refused = second.communicate(timeout=300)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)

    assert process.returncode == -signal.SIGINT  # which shells call 130
    assert err == "interrupted: 2 runs are left; the same line goes on\n"
    assert list((folder / "endless" / "none" / "seed-0" / "checkpoints").glob("ba*"))
    assert refused.startswith("ResumeError: another process trains in endless")


PICKY = """
from eventloop import hookimpl


class Plugin:
    @hookimpl
    def unsuitable(self, state):
        return "it needs images"

    @hookimpl
    def fit_start(self, state):
        pass
"""


@pytest.mark.nightly
def test_a_row_whose_algorithm_does_not_suit_the_task_is_refused_before_any_run(
    tiny, install, start
):
    """Else the table would have a row that is the same as another, after hours."""
    install(tiny, "nudge", NUDGE)
    install(tiny, "picky", PICKY)

    process = start(tiny, "tiny.py", "-p", "nudge", "-p", "picky", "--run-dir", "here")
    out, err = process.communicate(timeout=300)

    assert process.returncode
    assert "nothing was trained" in err
    for row in ("all", "without nudge"):
        assert f"{row}: PluginError: picky was asked for" in err
    assert [*tiny.glob("here/*/seed-*")] == []
    assert " batches in " not in out
