"""On an accelerator that accelerate has no name for, but torch has, trainers have the CPU's bits."""

from __future__ import annotations

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from hf_cases import CASES, trained

from eventloop import hookimpl
from eventloop_testing import counted_waits
from eventloop_testing import pretend_device as switched_on
from eventloop_transformers import on_eventloop

# accelerate refuses fp16 and bf16 there.
KINDS = [one for one in CASES if "16" not in one]


class Steps:
    """Keeps what the host waits for between the begin and the end of a step."""

    name = "steps"

    def __init__(self, waits):
        self.waits, self.found, self.num = waits, [], 0

    @hookimpl(tryfirst=True)
    def batch_start(self, state):
        self.num = len(self.waits)

    @hookimpl
    def batch_end(self, state):
        self.found += self.waits[self.num :]


@pytest.fixture(autouse=True)
def forgetting_the_device():
    """Accelerate keeps the first device of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def weights(folder, device, make, watchers=()):
    """Returns what a trainer ends with, on the host."""
    with pytest.MonkeyPatch.context() as patch:
        if device != "cpu":
            patch.setenv("ACCELERATE_TORCH_DEVICE", f"{device}:0")
        AcceleratorState._reset_state(reset_partial_state=True)
        kind = lambda one: on_eventloop(one, watchers=[*watchers])  # noqa: E731
        found = make(kind, str(folder / device), use_cpu=device == "cpu", logging_steps=100)
    return {name: one.cpu() for name, one in found["weights"].items()}


def on_both(folder, make):
    """Returns the weights of the CPU and of the accelerator, and the lines that a step waits in there."""
    expected = weights(folder, "cpu", make)
    with switched_on(draws_from_host=True), counted_waits() as waits:
        steps = Steps(waits)
        actual = weights(folder, "pretend", make, [steps])
    return expected, actual, {one.where.rpartition(":")[0] for one in steps.found}


def ours(files):
    """Returns those of eventloop and of this package; the clone's folder may be called eventloop, too."""
    return [one for one in files if "eventloop" in one.rpartition("site-packages")[2]]


@pytest.mark.about_cpu
@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_has_the_bits_of_the_cpu_and_no_step_waits_here(tmp_path, name):
    """What a step reads is read by transformers: whether rows are packed, by the model's attention."""

    def make(kind, out, **more):
        return trained(kind(transformers.Trainer), out, **CASES[name] | more)

    expected, actual, lines = on_both(tmp_path, make)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert not ours(lines)


@pytest.mark.nightly
@pytest.mark.about_cpu
@pytest.mark.parametrize("name", ["SFT", "SFT, packed", "DPO", "Reward", "GRPO", "RLOO", "KTO"])
def test_a_trainer_of_trl_has_them_too(tmp_path, name):
    """Completions are drawn as on the host."""
    pytest.importorskip("trl")
    from trl_cases import trl_trained

    def make(kind, out, **more):
        torch.manual_seed(0)
        return trl_trained(name, kind, out, **more)

    expected, actual, lines = on_both(tmp_path, make)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not ours(lines)
