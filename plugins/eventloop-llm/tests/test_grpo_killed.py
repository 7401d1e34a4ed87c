"""Kills, while it generates too, and other packages beside it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from grpo_cases import fit, grpo, trainer_of

from eventloop import hookimpl
from eventloop_checkpointing import Checkpointing
from eventloop_ema import Ema
from eventloop_muon import Muon

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from eventloop_composer.importing import declare_operators
declare_operators()  # of torchvision, which transformers imports
from test_grpo_killed import Marks
from grpo_cases import fit, grpo
fit(Path({place!r}), grpo(beta=0.1, num_iterations=2), Marks(), max_duration="30ba", checkpoint_keep=2)
"""


class Marks:
    """Leaves a file while completions are generated."""

    name = "marks"

    @hookimpl(wrapper=True)
    def rollout(self, state):
        mark = state.run_dir / "generating"
        mark.touch()
        time.sleep(0.05)
        found = yield
        mark.unlink()
        return found


@pytest.mark.nightly
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    """Twenty kills at random moments; each third waits for a generation."""
    given = {"max_duration": "30ba", "checkpoint_keep": 2}
    expected = fit(tmp_path / "one", grpo(beta=0.1, num_iterations=2), Marks(), **given)
    place, moments = tmp_path / "two", random.Random(3)
    script = SCRIPT.format(tests=str(Path(__file__).parent), place=str(place))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    mark, checkpoints = place / "run" / "generating", place / "run" / "checkpoints"
    in_generation = 0
    for idx in range(20):
        mark.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", script], env=environment)
        before = newest(checkpoints)
        while process.poll() is None and not (newest(checkpoints) > before or mark.exists()):
            time.sleep(0.005)
        if idx % 3 == 0:
            while process.poll() is None and not mark.exists():
                time.sleep(0.001)
            in_generation += process.poll() is None
        else:
            time.sleep(moments.random() * 0.6)
        process.send_signal(signal.SIGKILL)
        process.wait()

    mark.unlink(missing_ok=True)
    actual = fit(place, grpo(beta=0.1, num_iterations=2), Marks(), **given)

    assert in_generation >= 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def newest(folder):
    return max((int(one.name[2:10]) for one in folder.glob("ba*")), default=0)


BESIDE = {
    "ema": lambda: Ema(half_life="3ba"),
    "muon": lambda: Muon(),
    "checkpointing": lambda: Checkpointing(layers="model.layers.?"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BESIDE)
def test_other_packages_take_part(tmp_path, name):
    """A run with both, that ends while it generates, goes on with the same bits."""
    options = {"beta": 0.1, "num_iterations": 2}
    expected = fit(tmp_path / "one", grpo(**options), BESIDE[name]())
    fit(tmp_path / "two", grpo(**options), BESIDE[name](), in_rollout=3)

    actual = fit(tmp_path / "two", grpo(**options), BESIDE[name]())

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    with trainer_of(tmp_path / "three", grpo(**options), BESIDE[name]()) as trainer:
        assert name in trainer.state.plugins
