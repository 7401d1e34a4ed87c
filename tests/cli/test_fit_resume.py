"""A run of the command that is killed and started again, with something changed in between."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from eventloop.checkpoint.checkpoint_files import read_checkpoint
from eventloop.checkpoint.part_differences import differences
from eventloop.checkpoint.store import Store
from eventloop.cli.main import main

TASK = """
import os, signal
import torch
from torch import nn
from eventloop import Task, hookimpl
from eventloop_testing import tiny_batches

class Dies:
    name = "dies"
    @hookimpl
    def batch_start(self, state):
        if str(state.clock.batch) == os.environ.get("DIES_AT"):
            os.kill(os.getpid(), signal.SIGKILL)

def task():
    return Task(
        model=lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
        loss=nn.functional.cross_entropy,
        train_dataloader=tiny_batches(4),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=[Dies()],
        settings={"max_duration": "2ep", "device": "cpu", "checkpoint_interval": "1ba"},
    )
"""
DOUBLES = """
from eventloop import hookimpl
class Plugin:
    @hookimpl
    def before_train_batch(self, state):
        state.inputs = state.inputs * 2
"""

SCALES = """
from eventloop import hookimpl
class Plugin:
    def __init__(self, {option}):
        self.factor = factor
    @hookimpl
    def unsuitable(self, state):
        return {unsuitable}
    @hookimpl
    def before_train_batch(self, state):
        state.inputs = state.inputs * self.factor
"""


@pytest.fixture
def fit(clean):
    """Runs `eventloop fit` in a fork, which costs no imports; gives its status and what it wrote."""
    import torch._dynamo  # noqa: F401  AdamW wants it

    import eventloop.cli.fit  # noqa: F401

    (clean / "task.py").write_text(TASK)

    def fit(run_dir="run", *flags, dies_at=""):
        written = clean / "written.txt"
        pid = os.fork()
        if not pid:
            descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(descriptor, number)
            sys.stdout, sys.stderr = (os.fdopen(one, "w", buffering=1) for one in (1, 2))
            os.environ["DIES_AT"] = dies_at
            status = 70
            try:
                status = main(["fit", "task.py", "--run-dir", run_dir, *flags])
            finally:
                sys.stdout.flush(), sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return status, written.read_text()

    return fit


def result(folder):
    path, _ = Store(folder / "checkpoints").latest()
    parts = read_checkpoint(path).parts
    parts["plugins"].pop("jsonl", None)  # where its file ends, whose lines tell seconds
    return parts


def killed(fit):
    """Starts a run and has it killed in its sixth batch."""
    status, _ = fit(dies_at="5")
    assert status == -signal.SIGKILL


def test_an_algorithm_installed_after_a_kill_changes_no_byte(fit, install, clean):
    """A run is what it was when it began; a line says what stays out, and how to take it in."""
    fit("whole")
    killed(fit)
    install("doubles", DOUBLES)

    status, written = fit()

    assert status == 0
    assert "installed after the run began; add it with `-p doubles`" in written
    assert list(differences(result(clean / "whole"), result(clean / "run"))) == []


def test_an_algorithm_that_is_named_is_taken_in(fit, install, clean):
    """The control: the run is another one from there on."""
    fit("whole")
    killed(fit)
    install("doubles", DOUBLES)

    status, written = fit("run", "-p", "doubles")

    assert status == 0
    assert "changed since the run began: doubles takes part" in written
    assert list(differences(result(clean / "whole"), result(clean / "run")))


def test_a_learning_rate_edited_after_a_kill_is_refused_with_the_difference(fit, clean):
    """And nothing of the run has changed, so that it goes on when the edit is taken back."""
    fit("whole")
    killed(fit)
    (clean / "task.py").write_text(TASK.replace("lr=0.01", "lr=0.02"))

    status, written = fit()

    assert status == 2
    assert written.startswith("ResumeError: the run was begun with another configuration")
    assert (
        "-        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)" in written
    )
    assert (
        "+        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02)" in written
    )
    (clean / "task.py").write_text(TASK)
    assert fit()[0] == 0
    assert list(differences(result(clean / "whole"), result(clean / "run"))) == []


def test_an_edit_may_be_meant(fit, clean):
    """With `--allow-config-change` the run goes on, and says what has changed."""
    killed(fit)
    (clean / "task.py").write_text(TASK.replace("lr=0.01", "lr=0.02"))

    status, written = fit("run", "--allow-config-change")

    assert status == 0
    assert "changed since the run began" in written
    assert "lr=0.02" in written


@pytest.mark.parametrize(
    ("option", "unsuitable"),
    [("factor=1", "'no images'"), ("weight, factor=1", "None")],
)
def test_the_same_command_goes_on_with_the_option_of_an_algorithm_that_is_off(
    fit, install, option, unsuitable
):
    """What suits the data of another task, or waits for an option, may have others set for every run."""
    install("scales", SCALES.format(option=option, unsuitable=unsuitable))
    flag = ("--scales.factor", "2")

    killed_at = [fit("run", *flag, dies_at=at)[0] for at in ("3", "5")]

    assert killed_at == [-signal.SIGKILL] * 2
    assert fit("run", *flag)[0] == 0


def test_a_resumed_run_refuses_options_that_its_first_command_could_not_have_had(fit, install):
    """The control: misspelt, or of an algorithm that is off for another reason, one has no effect."""
    fit("run", dies_at="3")
    install("scales", SCALES.format(option="factor=1", unsuitable="None"))
    status, written = fit("run", "--scales.factor", "2")
    assert (status, "would have no effect: scales" in written) == (2, True)
    install("grows", SCALES.format(option="factor=1", unsuitable="'no images'"))
    fit("other", dies_at="3")

    status, written = fit("other", "--grows.facotr", "2")

    assert (status, "the closest is '--grows.factor'" in written) == (2, True)


def test_an_option_that_would_wake_an_algorithm_is_refused_by_a_run_without_it(fit, install):
    """It would take part in a run that began without it, or the option would do nothing."""
    install("scales", SCALES.format(option="weight, factor=1", unsuitable="None"))
    fit("run", dies_at="3")

    status, written = fit("run", "--scales.weight", "2")

    assert (status, "would have no effect: scales" in written) == (2, True)
