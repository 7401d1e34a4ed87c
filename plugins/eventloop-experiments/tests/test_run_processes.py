"""Runs in processes of their own: what a signal does to them."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventloop_experiments.runs import RunProcesses, RunsFolder


@dataclass(frozen=True)
class Failing:
    """A run that leaves its reason in its log, where it isn't stopped before."""

    place = Path("failing")
    argv = ("fit", "nowhere.py")


@pytest.mark.nightly
def test_a_run_that_starts_while_a_signal_arrives_is_stopped_too(tmp_path):
    """Otherwise the command would wait for it to train to its end."""
    folder = RunsFolder(tmp_path, "trial")

    def runs():
        os.kill(os.getpid(), signal.SIGTERM)
        yield Failing()

    with RunProcesses(folder) as processes:
        assert list(processes.outcomes(runs())) == []

    assert folder.log(Failing()).read_text() == ""
    assert str(processes.stopped("1 run is left")) == "terminated: 1 run is left"
