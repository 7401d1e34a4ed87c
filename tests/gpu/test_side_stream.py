"""Copies to the GPU run beside what it computes, and no batch is overwritten while it is used."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from eventloop import hookimpl

WIDTH = 4096
NUM_SAMPLES = 8192
NUM_BATCHES = 12
NUM_STEADY = 8  # the first batches are waited for: nothing is computed yet
BATCH_BYTES = NUM_SAMPLES * WIDTH * 4


class Perceptron(nn.Module):
    """Several products for each batch, which take longer than its copy."""

    def __init__(self, depth=4):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs):
        return self.layers(inputs)


@pytest.fixture
def traced(timeline, make_run):
    """Trains on batches of 128 MiB in pinned memory; gives their copies, and the kernels."""

    def traced(cuda, pin_memory=True):
        batches = [(torch.randn(NUM_SAMPLES, WIDTH, pin_memory=pin_memory), torch.zeros(NUM_SAMPLES))
                   for _ in range(2)]  # fmt: skip
        task = {
            "model": Perceptron,
            "loss": lambda outputs, targets: outputs.square().mean(),
            "train_dataloader": batches * (NUM_BATCHES // 2),
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-6, fused=True),
        }
        trainer = make_run(cuda, task, max_duration=f"{2 * NUM_BATCHES}ba")
        trainer.fit(until=f"{NUM_BATCHES}ba")
        activities = timeline.record(lambda: trainer.fit(until=f"{2 * NUM_BATCHES}ba"), cuda)
        # The outputs, which the device copies for itself, are as large.
        copies = [one for one in activities if one.kind == "gpu_memcpy"
                  and "HtoD" in one.name and one.num_bytes == BATCH_BYTES]  # fmt: skip
        return copies, [one for one in activities if one.kind == "kernel"]

    return traced


def test_a_copy_runs_beside_the_computation(cuda, traced, timeline):
    """On a stream of its own, from pinned memory, while the batch before is computed on."""
    copies, kernels = traced(cuda)

    assert len(copies) == NUM_BATCHES
    assert all("Pinned" in one.name for one in copies)
    assert {one.stream for one in copies}.isdisjoint(one.stream for one in kernels)
    hidden = [timeline.hidden_frac(one, kernels) for one in copies[-NUM_STEADY:]]
    assert min(hidden) > 0.9, hidden


def test_a_copy_in_line_hides_behind_nothing(cuda, traced, timeline, monkeypatch):
    """Control: on the stream that computes, everything waits for it."""

    def in_line(device, streams):
        return lambda batch: [one.to(device, non_blocking=True) for one in batch]

    monkeypatch.setattr("eventloop.data.batches.SideStream", in_line)

    copies, kernels = traced(cuda)

    assert {one.stream for one in copies} <= {one.stream for one in kernels}
    assert max(timeline.hidden_frac(one, kernels) for one in copies) < 0.1


class KeepsBusy:
    """Gives the device much to do before each forward pass, so that the host is far ahead."""

    def __init__(self, device):
        width = WIDTH if device.type == "cuda" else 1
        self.matrix = torch.zeros(width, width, device=device)
        self.product = torch.empty_like(self.matrix)

    @hookimpl
    def before_forward(self, state):
        for _ in range(10):
            torch.mm(self.matrix, self.matrix, out=self.product)


class Looks:
    """Keeps the mean of each batch as the device finds it, when it gets there."""

    name = "looks"  # after the other

    def __init__(self):
        self.means = []

    @hookimpl
    def before_forward(self, state):
        self.means.append(state.microbatch[0].mean())


@pytest.fixture
def means(make_run):
    """Trains on batches that are full of one number each; gives the numbers the device found."""

    def means(device, pin_memory=False):
        pin_memory = pin_memory and device.type != "cpu"
        batches = [(torch.full((1024, 256), float(idx), pin_memory=pin_memory), torch.zeros(1024))
                   for idx in range(NUM_BATCHES)]  # fmt: skip
        task = {
            "model": lambda: nn.Linear(256, 1),
            "loss": lambda outputs, targets: outputs.mean(),
            "train_dataloader": batches,
        }
        looks = Looks()
        make_run(device, task, algorithms=[KeepsBusy(device), looks]).fit()
        return torch.stack(looks.means).tolist()

    return means


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_batch_stays_until_it_has_been_used(pin_memory, device, means):
    """The host lets go of it long before; its memory waits for those who compute."""
    assert means(device, pin_memory) == list(range(NUM_BATCHES))


def test_a_batch_that_was_expanded_arrives(device, make_run):
    """Its entries share memory, which torch doesn't pin."""
    looks = Looks()
    batches = [(torch.tensor([3.0]).expand(16, 4), torch.zeros(1).expand(16))]
    task = {
        "model": lambda: nn.Linear(4, 1),
        "loss": lambda outputs, targets: outputs.mean(),
        "train_dataloader": batches,
    }

    make_run(device, task, algorithms=[looks]).fit()

    assert torch.stack(looks.means).tolist() == [3.0]


def test_memory_that_nobody_holds_is_overwritten(cuda, means, monkeypatch):
    """Control: the next copy, beside the computation, takes the place of a batch in use."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)

    assert means(cuda, pin_memory=True) != list(range(NUM_BATCHES))


def test_the_plain_loop_of_the_benchmark_prefetches_too(device, benchmark_module):
    """A step ahead, on a stream of its own; each batch arrives once, and in order."""
    loops = benchmark_module("gpu_loops")
    made = [(torch.full((2,), idx), torch.full((3,), idx)) for idx in range(4)]
    batches = loops.prefetched(loops.Batches(made, device), device)

    got = list(itertools.islice(batches, 6))

    assert all(one.device == device for batch in got for one in batch)
    assert [[one.tolist() for one in batch] for batch in got] == [
        [[idx % 4] * 2, [idx % 4] * 3] for idx in range(6)
    ]
