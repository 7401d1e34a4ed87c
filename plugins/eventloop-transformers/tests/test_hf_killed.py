"""Processes that are killed from outside, at any moment: the run ends as theirs does in one go."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_cases import differing, process_environment
from hf_killed import KINDS

SCRIPT = Path(__file__).with_name("hf_killed.py")
NUM_KILLS = 4


def started(what: str, folder: Path, loop: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    environment = process_environment(folder.parent / "site")
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, SCRIPT, what, str(folder), loop],
            env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def finished(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    assert process.wait() == 0, (folder / "output.txt").read_text()[-3000:]
    found: dict[str, Any] = torch.load(folder / "result.pt", weights_only=False)
    return found


def kill_when_further(process: subprocess.Popen[bytes], folder: Path, draws: random.Random) -> bool:
    """Kills the process a moment after it has saved another checkpoint; returns whether it did."""
    before = checkpoints(folder)
    while process.poll() is None:
        if checkpoints(folder) - before:
            time.sleep(draws.random() * 0.5)
            process.kill()
            return process.wait() != 0
        time.sleep(0.01)
    return False


def checkpoints(folder: Path) -> set[str]:
    return {one.name for one in (folder / "run" / "checkpoints").glob("*")}


@pytest.mark.nightly
@pytest.mark.parametrize("what", KINDS)
def test_killed_at_any_moment_it_ends_as_theirs(tmp_path, what):
    """In a batch, an evaluation, a save of the trainer's or of eventloop's."""
    draws = random.Random(what)
    whole = finished(started(what, tmp_path / "theirs", "theirs"), tmp_path / "theirs")

    folder, num_killed = tmp_path / "ours", 0
    for _ in range(NUM_KILLS):
        num_killed += kill_when_further(started(what, folder, "ours"), folder, draws)
    before = checkpoints(folder)
    found = finished(started(what, folder, "ours"), folder)

    assert num_killed
    unlike = {"random": 0} if checkpoints(folder) == before else {}  # it was over, and drew nothing
    assert differing({**whole, **unlike}, {**found, **unlike}) == []
