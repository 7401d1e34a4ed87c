"""The header: what takes part, with which options, and why what is off is off."""

from __future__ import annotations

import pytest

ALPHA = """
from eventloop import hookimpl

class Plugin:
    def __init__(self, *, alpha: float = 0.4):
        self.alpha = alpha

    @hookimpl
    def fit_start(self, state):
        print("alpha is", self.alpha)
"""


def test_an_installed_plugin_takes_part_and_stands_in_the_header(run, tiny, install):
    """Install it, and the next fit has it; switch it off, and the header says why."""
    install("alpha-test", ALPHA, version="0.3")

    on = run("fit", "tiny.py", "--no-plugins", "-p", "alpha-test", "--alpha-test.alpha", "0.2").out
    off = run("fit", "tiny.py", "-p", "no:alpha_test").out

    assert "algorithms: alpha-test 0.3 (alpha=0.2)" in on
    assert "alpha is 0.2" in on
    assert "alpha-test (-p no:alpha_test)" in off
    assert "alpha is" not in off


@pytest.mark.parametrize("could_be", [True, False])
def test_the_header_advises_a_fused_step_where_it_pays(could_be, run, tiny, monkeypatch):
    """It is one argument; whoever has no GPU isn't bothered."""
    if could_be:
        monkeypatch.setattr("eventloop.cli.header.could_be_fused", lambda optimizer, device: True)

    ran = run("fit", "tiny.py")

    advice = "advice: the optimizer 'sgd' steps faster as SGD(..., fused=True)\n"
    assert (advice in ran.out + ran.err) == could_be


WRAPS = """
from eventloop import hookimpl

class Plugin:
    @hookimpl(wrapper=True)
    def loss(self, state):
        return (yield)
"""
UPDATES = """
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def train_batch(self, state):
        return state.update(lambda state: state.model(state.batch[0]).mean())
"""


@pytest.mark.parametrize("owner", [[], ["-p", "updates"]])
def test_the_header_names_plugins_that_an_owner_of_train_batch_passes_by(owner, run, tiny, install):
    """They would be on, and do nothing."""
    install("wraps", WRAPS)
    install("updates", UPDATES)

    ran = run("fit", "tiny.py", "--no-plugins", "-p", "wraps", *owner)

    line = "no effect in training: wraps (loss), because updates owns train_batch"
    assert (line in ran.out) == bool(owner)
    assert ran.status == 0


def test_the_header_marks_what_nobody_asked_for(run, install, tiny):
    """It is on only because something else needed it."""
    install("aa-test", requested=False)

    ran = run("fit", "tiny.py", "--max-duration", "1ba", "--no-plugins", "-p", "aa-test")

    assert "aa-test 1.0 [dependency]" in ran.out


OPTIMIZER = """
import torch
from eventloop import hookimpl

class Plugin:
    @hookimpl
    def build_optimizers(self, state):
        return {"optimizer": torch.optim.SGD(state.model.parameters(), lr=0.1)}
"""


def test_the_header_says_what_a_plugin_does_instead_of_the_task(run, install, tiny):
    """Installed, it replaces the task's optimizer, and nobody should have to guess."""
    install("aa-test", OPTIMIZER)

    ran = run("fit", "tiny.py", "--max-duration", "1ba", "--no-plugins", "-p", "aa-test")

    assert ran.status == 0, ran.err
    assert "build_optimizers: aa-test, instead of the task's" in ran.out


def test_the_header_gives_a_reason_once(tiny, run, install):
    """With --no-plugins every line of it would be the same words."""
    install("aa-test")
    install("bb-test")

    line = next(
        one
        for one in run("fit", "tiny.py", "--no-plugins").out.splitlines()
        if one.startswith("off: ")
    )

    assert "aa-test, bb-test" in line
    assert line.count("(--no-plugins)") == 1


@pytest.mark.parametrize(
    ("flags", "plugin"),
    [
        (["--dry-run"], "algorithms: limit-batches --dry-run"),
        (["--overfit-batches", "1"], "algorithms: overfit --overfit-batches"),
        (["--limit-eval-batches", "1"], "algorithms: limit-batches --limit-eval-batches"),
        (
            ["--limit-train-batches", "1", "--limit-eval-batches", "1"],
            "algorithms: limit-batches --limit-train-batches --limit-eval-batches",
        ),
    ],
)
def test_the_header_names_the_flag_of_what_a_flag_adds(flags, plugin, run, tiny):
    """Nobody who typed it has called Trainer."""
    assert plugin in run("fit", "tiny.py", "--no-plugins", *flags).out.splitlines()
