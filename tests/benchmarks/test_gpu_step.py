"""The benchmark for GPUs runs anywhere; what it compares does the same work."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
NAMES = ("small_cnn", "resnet50", "gpt2")


@pytest.fixture
def load(clean, monkeypatch):
    """Imports a module of benchmarks/, as a script of that folder does."""
    monkeypatch.syspath_prepend(PATH)
    return importlib.import_module


@pytest.fixture
def gpu_step(load):
    return load("gpu_step")


@pytest.fixture
def timeline(load):
    return load("gpu_timeline")


@pytest.mark.nightly
def test_without_a_gpu_it_runs_and_says_what_that_is_worth(gpu_step, capsys):
    """Whoever tries it on a CPU sees that it works, and isn't misled."""
    gpu_step.main(["--device", "cpu", "--workload", "small_cnn", "--steps", "1", "--turns", "1"])

    told = capsys.readouterr().out
    assert "small_cnn x 4, eager" in told
    assert "these numbers mean nothing" in told


@pytest.mark.nightly
def test_every_workload_is_measured_with_the_machine_named(gpu_step, capsys):
    """A number without its machine is not a number."""
    gpu_step.main(["--device", "cpu", "--steps", "1", "--turns", "2", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["device"] == "CPU"
    assert told["machine"]["torch"] == torch.__version__
    assert [row["workload"] for row in told["rows"]] == list(NAMES)
    for row in told["rows"]:
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["plain"]["host_ms"] > 0
        assert row["eventloop"]["host_ms"] > 0


@pytest.fixture
def trained(load):
    """Makes so many steps of one of the loops over a tiny network; gives its parameters."""
    loops = load("gpu_loops")

    def trained(name: str, loop: str, num_steps: int = 6):
        workload = load("gpu_workloads").workloads(tiny=True)[name]
        made = [workload.make_batch(4, torch.Generator().manual_seed(idx)) for idx in range(3)]
        models = []

        def make_model():
            models.append(workload.make_model())
            return models[-1]

        watched = dataclasses.replace(workload, make_model=make_model)
        make = {"plain": loops.plain_run, "eventloop": loops.eventloop_run}[loop]
        with make(watched, loops.Batches(made, CPU), CPU, compiled=False) as run:
            run(num_steps)
        return dict(models[0].named_parameters())

    return trained


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_both_loops_train_the_same(name, trained):
    """To rounding: one converts the whole model to channels_last, the other the convolutions."""
    expected = trained(name, "plain")

    assert_near(trained(name, "eventloop"), expected)
    with pytest.raises(AssertionError):  # control: a step less is seen
        assert_near(trained(name, "eventloop", num_steps=5), expected)


def assert_near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4, check_stride=False)


@pytest.mark.parametrize(
    ("name", "num_parameters"), [("resnet50", 25_557_032), ("gpt2", 124_475_904)]
)
def test_networks_have_the_size_of_those_they_are_named_after(name, num_parameters, gpu_step):
    """GPT-2's 50,257 tokens are padded to 50,304."""
    with torch.device("meta"):
        model = gpu_step.workloads()[name].make_model()

    assert sum(param.numel() for param in model.parameters()) == num_parameters


def test_the_time_of_the_host_is_taken_between_batches(gpu_step):
    """One time less than there are batches, whoever takes them; none where nobody asks."""
    batches = gpu_step.Batches([("a", "b")], CPU)
    taken = iter(batches)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            next(taken)

    assert batches.host_ms(run, 5) >= 0
    assert len(batches.host_s) == 4
    run(5)
    assert len(batches.host_s) == 4


TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20.0, "dur": 10.0,
         "args": {"stream": 7, "device": 0}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 10, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 12.0,
         "dur": 4.0, "args": {"stream": 20, "bytes": 4096}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "Optimizer.step", "ts": 0.0, "dur": 99,
         "args": {"stream": 7}},
        {"ph": "M", "name": "process_name", "pid": 1},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 5.0},
    ]
}  # fmt: skip


def test_a_trace_is_read(timeline):
    """Kernels and copies in order, not what the host did to launch them, nor marks."""
    first, copy, last = timeline.activities_of(TRACE)

    assert (first.start_us, copy.start_us, last.end_us) == (5, 12, 30)
    assert (copy.kind, copy.stream, copy.num_bytes) == ("gpu_memcpy", 20, 4096)
    assert timeline.counts([first, copy, last], "kernel") == {"gemm": 2}


def test_time_is_counted_once_however_many_kernels_run(timeline):
    """And a copy is hidden as far as one of them is under way."""
    first, copy, last = timeline.activities_of(TRACE)

    assert timeline.busy_us([last, first, copy]) == 11 + 10
    assert timeline.hidden_frac(copy, [last, first]) == 3 / 4


def test_what_ran_is_recorded(timeline):
    """On the host as on a device: a product is an operation."""
    one = torch.ones(4, 4)

    activities = timeline.record(lambda: one @ one, CPU)

    assert timeline.counts(activities, "cpu_op")["aten::mm"] == 1
