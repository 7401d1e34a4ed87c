"""No step of any plugin waits for the device, as benchmarks/host_reads.py finds on the pretend one."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
WAITS = """
import torch
from eventloop import hookimpl


class Plugin:
    @hookimpl
    def batch_end(self, state):
        state.loss.item()
        torch.accelerator.synchronize() if state.device.type != "cpu" else None
"""


@pytest.fixture(scope="module")
def host_reads():
    """The module benchmarks/host_reads.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("host_reads")


def names():
    """The plugins of this repository; "" is a run without one."""
    plugins = [""]
    for path in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        points = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        for group in ("eventloop.algorithms", "eventloop.callbacks"):
            plugins += points.get(group, {})
    return plugins


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", names())
def test_no_step_waits_and_the_weights_are_those_of_the_cpu(name, host_reads):
    """On a GPU each wait leaves it idle, and nothing on the CPU shows it."""
    packages = {one.name: one for one in host_reads.packages_in(host_reads.PLUGINS)}

    row = host_reads.in_a_fork(packages.get(name), "fp32")

    assert not row.waits
    if row.kind:
        # torch averages weights by another formula where a device has kernels for many tensors.
        assert row.weights == "same" or name == "swa"
        # A curriculum begins with a part of the samples.
        assert row.steps == (14 if name == "curriculum" else 18)
    else:
        assert "has no part" in row.problem


def test_a_step_in_fp16_waits_once(host_reads):
    """For whether it was made: the optimizer of the task isn't fused."""
    row = host_reads.in_a_fork(None, "fp16")

    assert sum(row.waits.values()) == row.steps
    assert {one.partition(":")[0] for one in row.waits} == {"eventloop"}


def test_a_plugin_that_waits_is_told_with_the_line(host_reads, tmp_path):
    """Control: twice a step, in two ways."""
    source = tmp_path / "eventloop-waits" / "src"
    source.mkdir(parents=True)
    (source / "eventloop_waits.py").write_text(WAITS)
    (source.parent / "pyproject.toml").write_text(
        '[project]\nname = "eventloop-waits"\nversion = "0.1.0"\n'
        '[project.entry-points."eventloop.algorithms"]\nwaits = "eventloop_waits:Plugin"\n'
    )

    (package,) = host_reads.packages_in(tmp_path)
    row = host_reads.in_a_fork(package, "fp32")

    assert row.waits == {
        "eventloop_waits: item, eventloop_waits.py:9": row.steps,
        "eventloop_waits: synchronize, eventloop_waits.py:10": row.steps,
    }


def test_a_loop_that_reads_its_loss_is_counted_and_one_that_does_not_is_not(monkeypatch):
    """What the table of other frameworks is made with."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    others = importlib.import_module("host_reads_others")

    def reading(device, begins):
        for _ in range(4):
            begins()
            torch.ones((), device=device).item()

    assert others.counted("torch", reading)["reads"] == 1
    assert others.counted(*others.LOOPS["plain loop"])["reads"] == 0
    assert others.counted(*others.LOOPS["eventloop"])["reads"] == 0
    assert others.counted("no_such_framework", reading)["problem"].startswith("not installed")
