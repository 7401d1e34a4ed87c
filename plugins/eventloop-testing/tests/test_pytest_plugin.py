"""The pytest plugin, as it works in somebody else's project."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import eventloop
import eventloop_testing

SOURCES = [str(Path(one.__file__).parents[1]) for one in (eventloop, eventloop_testing)]
PLUGIN = "eventloop_testing.plugin"
TESTS = """
import torch
from eventloop import hookimpl

class Reads:
    @hookimpl
    def batch_end(self, state):
        float(state.loss)

def test_a_trainer_is_alone(make_trainer, tiny_task):
    trainer = make_trainer(tiny_task)
    assert [one.name for one in trainer.plugins] == ["task"]
    assert trainer.state.settings.seed == 0
    trainer.fit()

def test_a_recorder_records(make_trainer, make_recorder):
    recorder = make_recorder()
    make_trainer(callbacks=[recorder]).fit()
    assert recorder.seen.count("batch_end") == 3

def test_nobody_reads(make_trainer, no_device_reads, make_recorder):
    make_trainer(callbacks=[make_recorder()], observers=[no_device_reads]).fit()

def test_somebody_reads(make_trainer, no_device_reads):
    make_trainer(callbacks=[Reads()], observers=[no_device_reads]).fit()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory: an empty project, in whose environment is a setting for runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":".join(SOURCES), prepend=":")
    monkeypatch.setenv("EVENTLOOP_SEED", "5")
    return tmp_path


@pytest.fixture
def run_pytest(project):
    """Runs pytest in a project of its own, with the plugin; gives what it wrote.

    In a fork, which has torch and what the fixtures need already.
    """
    for module in ("eventloop_testing.case", "torchmetrics.classification"):
        importlib.import_module(module)

    def run_pytest(tests: str, *options: str) -> str:
        (project / "test_it.py").write_text(tests)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _run_and_exit(["-p", PLUGIN, "-p", "no:cacheprovider", "-q", *options])
        os.waitpid(pid, 0)
        return (project / "out.txt").read_text()

    return run_pytest


def _run_and_exit(arguments):
    """Ends a fork; what the pytest around it would do is its parent's to do."""
    try:
        gc.freeze()
        sys.stdout = sys.__stdout__ = os.fdopen(os.open("out.txt", os.O_CREAT | os.O_WRONLY), "w")
        os.dup2(sys.stdout.fileno(), 1)
        for name in [one for one in os.environ if one.startswith("PYTEST_")]:
            del os.environ[name]
        pytest.main(arguments)
        sys.stdout.flush()
    finally:
        os._exit(0)


def test_the_fixtures_work(run_pytest):
    """For tests that know nothing of this project but its name."""
    out = run_pytest(TESTS)

    assert "4 passed, 1 error" in out
    assert "ERROR test_it.py::test_somebody_reads" in out
    assert "reads (Trainer(callbacks=...)), batch_end: read from the device with item()" in out


@pytest.mark.nightly
def test_torch_is_not_imported_where_nobody_needs_it(project):
    """Every pytest run of the environment loads this plugin."""
    tests = "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
    (project / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-q"]

    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "1 passed" in ran.stdout


DEVICES = """
import torch

def test_a_trainer_is_on_the_device(make_trainer):
    assert make_trainer().state.device == torch.device("pretend:0")
    assert make_trainer(device="cpu").state.device == torch.device("cpu")

def test_a_race_fails_in_its_test():
    buffer = torch.ones(3, pin_memory=True)
    buffer.to("pretend", non_blocking=True)
    buffer.zero_()

def test_the_next_one_passes(make_trainer):
    make_trainer().fit()
"""


def test_all_tests_run_on_the_pretend_accelerator(run_pytest):
    """Without a change to them; a race is told by the test in which it was."""
    out = run_pytest(DEVICES, "--device", "pretend")

    assert "3 passed, 1 error" in out
    assert "ERROR test_it.py::test_a_race_fails_in_its_test" in out
