"""The command: its runs, its output, what it reads and what it leaves alone."""

import importlib.metadata
import json
import os
import sys

import pytest

from eventloop import TaskError
from eventloop.commands import UsageError, prepare, read_arguments
from eventloop_check.check_loss import run
from eventloop_check.check_loss.check_loss_command import COMMAND, declared_laws
from eventloop_check.check_loss.compare import Comparison
from eventloop_check.check_loss.laws import VARIANTS
from eventloop_check.check_loss.loss_check import check
from eventloop_check.check_loss.measurement import Measurement, Part, Update
from eventloop_check.check_loss.report import content_of, write_report

TASK = """
import torch
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task

def task(scale: float = 1.0):
    torch.manual_seed(0)
    inputs = torch.randn(5, 3)
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)),
        loss=lambda outputs, targets: scale * outputs.square().sum(),
        train_dataloader=DataLoader(TensorDataset(inputs, inputs), batch_size=5),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        settings={"max_duration": "3ep", "device": "cpu", "clip_norm": 1e-3},
    )
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a task whose loss is a sum."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "summed.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("summed", None)


def install_nosy(folder, monkeypatch):
    """Installs an algorithm that leaves a file where it is imported."""
    (folder / "nosy.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nclass Nosy: pass\n"
    )
    info = folder / "eventloop_nosy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eventloop-nosy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[eventloop.algorithms]\nnosy = nosy:Nosy\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    assert importlib.metadata.version("eventloop-nosy") == "1.0"


@pytest.mark.nightly
def test_the_command_finds_the_factor_and_leaves_nothing_behind(folder, monkeypatch, capsys):
    """In processes of its own, two as ranks; clipping comes later, and plugins take no part."""
    install_nosy(folder, monkeypatch)
    before = {one.name for one in folder.iterdir()}

    status = run(["summed.py", "--json", "--task.scale", "2", "--samples", "4"])

    content = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in content["rows"]}
    assert status == 1
    assert content["samples"] == 4
    assert rows["microbatch-1"]["loss_factor"] == pytest.approx(1 / 4, rel=1e-5)
    assert rows["microbatch-1"]["gradient_factor"] == pytest.approx(1 / 4, rel=1e-4)
    assert rows["ranks"]["result"] == "differs"
    assert rows["ranks"]["cause"]["kind"] == "sum"
    assert rows["reversed"]["result"] == "holds"
    assert content["dropout_off"]
    assert {one.name for one in folder.iterdir()} <= {*before, "__pycache__"}


def declared_in(folder, text, *argv):
    (folder / "summed.py").write_text(TASK + text)
    arguments = read_arguments(["summed.py", *argv], COMMAND)
    return declared_laws(arguments, prepare(arguments, COMMAND))


def test_laws_are_declared_in_the_file_and_on_the_command_line(folder):
    """The reason of the file is kept."""
    text = 'LOSS_LAWS_NOT_KEPT = {"ranks": "batch norms"}\n'

    found = declared_in(folder, text, "--not", "ranks,order")

    assert found == {"ranks": "batch norms", "order": "--not"}


@pytest.mark.parametrize("text", ['LOSS_LAWS_NOT_KEPT = ["ranks"]', "LOSS_LAWS_NOT_KEPT = {1: 2}"])
def test_a_declaration_without_reasons_is_an_error(folder, text):
    """A law that is given up without a reason is given up for good."""
    with pytest.raises(TaskError, match="not reasons by law"):
        declared_in(folder, text)


def test_a_law_that_is_misspelt_is_an_error(folder):
    """It would be checked all the same, or never."""
    with pytest.raises(UsageError, match=r"no law is named 'rank'.*'ranks'"):
        declared_in(folder, "", "--not", "rank")


@pytest.mark.parametrize(
    "flag", ["--microbatch-size=2", "--run-dir=runs/a", "--resume=never", "--autoload=true"]
)
def test_a_setting_that_each_run_has_of_its_own_is_an_error(folder, flag):
    """It would have no effect."""
    with pytest.raises(UsageError, match="no effect here"):
        run(["summed.py", flag])


# What is made of the measurements


def measurement(loss, compared=None, **more):
    update = Update(0, loss, [Part(loss, 4.0, {"samples": 4})], compared)
    facts = {
        "samples": 4,
        "unpicked": "",
        "unpadded": "no padding",
        "unpacked": "no",
        "dropouts": [],
        "draws": [],
    }
    return Measurement([update], **{**facts, "batch_norms": [], "moved_buffers": [], **more})


SAME = Comparison(1.0, 1.0, 1.0, 1.0, 0.0, 0.0)
HALF = Comparison(0.5, 1.0, 1.0, 0.5, 0.0, 0.5)


def reported(declared, whole=None, **others):
    """The report where these variants differ and all others are the same."""
    whole = whole or measurement(1.0)

    def measure(variants):
        found = {one.name: measurement(1.0, SAME) for one in variants if one.reference}
        found |= {one.name: whole for one in variants if not one.reference}
        return {name: others.get(name.replace("-", "_"), found[name]) for name in found}

    return check(measure, declared)


def test_a_declared_law_does_not_fail_the_check():
    """Another one does."""
    halved = measurement(0.5, HALF)

    assert reported({"ranks": "why"}, ranks=halved).succeeds
    assert not reported({"order": "why"}, ranks=halved).succeeds


def test_a_law_that_is_declared_and_kept_is_told():
    """Else it would stay declared when it is broken for another reason."""
    assert reported({"ranks": "why"}).unneeded == ["ranks"]


def test_a_run_that_fails_fails_the_check_with_its_reason():
    """A task that can't be trained in microbatches is found here, not at scale."""
    report = reported({}, microbatch_3="TaskError: it can't be split")

    (row,) = (one for one in report.rows if one.result == "failed")
    assert (row.variant.name, row.reason) == ("microbatch-3", "TaskError: it can't be split")
    assert not report.succeeds


def test_a_check_that_compares_nothing_fails():
    """It would say that all is well."""
    unseen = measurement(1.0, samples=1, unpicked="no samples")
    nothing = Measurement([], 4, "", "", "no", [], [], [], [])

    assert not reported({}, whole=nothing).succeeds
    assert reported({}, whole=nothing).rows[0].reason.startswith("the task trains without")
    assert {row.result for row in reported({}, whole=unseen).rows} == {"holds", "not tried"}


def test_the_table_says_what_differs_and_why(capsys):
    """Once for the rows of one cause."""
    halved = measurement(0.5, HALF)

    write_report(reported({"order": "a game of chance"}, microbatch_1=halved, reversed=halved))

    out = capsys.readouterr().out
    assert "microbatches of 1                differs    x 0.5  x 0.5     0.0 %" in out
    assert "declared: reversed order: a game of chance" in out
    assert out.count("  fix  ") == 1
    assert "not tried: unequal lengths in microbatches, more padding" in out
    assert out.endswith("check-loss: 2 hold, 1 differs, 1 declared\n")


def test_json_has_what_the_table_has():
    """For programs that decide by it."""
    content = content_of("task.py", reported({}, ranks=measurement(0.5, HALF)))

    (row,) = (one for one in content["rows"] if one["name"] == "ranks")
    assert (row["result"], row["loss_factor"], row["gradient_factor"]) == ("differs", 0.5, 0.5)
    assert content["succeeds"] is False
    json.dumps(content)


def test_every_variant_has_a_row_or_is_a_reference():
    """One that is added is compared."""
    for one in VARIANTS.values():
        assert bool(one.reference) == (one.name not in ("whole", "short"))
