"""A step never waits for the device: nothing reads a tensor on the host."""

from __future__ import annotations

import io
from contextlib import ExitStack
from unittest import mock

import numpy
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics.classification import MulticlassAccuracy

from eventloop import hookimpl
from eventloop_jsonl import Jsonl
from eventloop_mixup import Mixup
from eventloop_progress import Progress
from eventloop_testing import run_ranks

NUM_STEPS = 100


class HostReads(TorchDispatchMode):
    """An algorithm that counts host reads from `after_dataloader` to `scheduler_step`.

    `item`, `bool`, `float` and their like end in one operator; `tolist` and `numpy` pass it by.
    """

    name = "a-host-reads"  # before the others, so that it sees all of them

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0
        self.num_windows = 0
        self._window: ExitStack | None = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))

    def open(self) -> None:
        self._window = ExitStack()
        self._window.enter_context(self)
        for name in ("tolist", "numpy"):
            reader = self._counted(getattr(Tensor, name))
            self._window.enter_context(mock.patch.object(Tensor, name, reader))

    def stop(self) -> None:
        if self._window is not None:
            self.num_windows += 1
            self._window.close()
            self._window = None

    @hookimpl(tryfirst=True)
    def after_dataloader(self, state):
        self.open()

    @hookimpl(wrapper=True, tryfirst=True)
    def scheduler_step(self, state, interval):
        try:
            return (yield)
        finally:
            if state.precision.name != "fp16":  # the schedulers follow amid the next step there
                self.stop()

    @hookimpl(tryfirst=True)
    def batch_checkpoint(self, state):
        self.stop()

    def _counted(self, read):
        def reader(tensor, *args, **kwargs):
            self.num_reads += 1
            return read(tensor, *args, **kwargs)

        return reader


READS = {
    "item": lambda tensor: tensor.item(),
    "bool": bool,
    "float": float,
    "int": int,
    "if": lambda tensor: 1 if tensor > 0 else 0,
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "array": numpy.asarray,
    "format": lambda tensor: f"{tensor:.2f}",
    "max": lambda tensor: max(tensor, tensor + 1),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_counter_sees_a_read(read):
    """Control: whatever it is called, in the window once and outside of it never."""
    counter, tensor = HostReads(), torch.tensor(2.0)

    read(tensor)
    counter.open()
    read(tensor)
    counter.stop()
    read(tensor)

    assert counter.num_reads == 1


@pytest.fixture
def reads(make_trainer, make_task, make_batches):
    """Trains 100 steps with mixup, clipping, a scheduler, metrics and two microbatches."""

    def reads(
        *algorithms, on_terminal: bool = False, fused: bool = False, forward=None, **given
    ) -> HostReads:
        counter, progress = HostReads(), Progress(refresh_per_s=1e9)
        progress.console = Console(file=io.StringIO(), force_terminal=on_terminal)
        task = make_task(
            model=lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
            train_dataloader=make_batches(20),
            eval_dataloaders=make_batches(2),
            optimizer=lambda model: torch.optim.SGD(
                model.parameters(), lr=0.1, momentum=0.9, fused=fused
            ),
            scheduler=lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, NUM_STEPS),
            metrics={"accuracy": MulticlassAccuracy(3)},
            train_metrics={"accuracy": MulticlassAccuracy(3, validate_args=False)},
            num_tokens=lambda inputs: inputs.numel(),
            forward=forward,
        )
        make_trainer(
            task,
            algorithms=[counter, Mixup(), *algorithms],
            callbacks=[progress, Jsonl()],
            **{"max_duration": f"{NUM_STEPS}ba", "microbatch_size": 2, "clip_norm": 0.5,
               "clip_value": 0.1} | given,
        ).fit()  # fmt: skip
        return counter

    return reads


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_no_step_reads_a_tensor(precision, on_terminal, reads):
    """100 steps with the project's plugins on: the device is never waited for."""
    counter = reads(precision=precision, on_terminal=on_terminal)

    assert (counter.num_reads, counter.num_windows) == (0, NUM_STEPS)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_in_fp16_reads_once(fused, reads):
    """Whether it was made: by an optimizer that isn't fused at once, else during the next step.

    Between steps it is known without a read of its own where an epoch ends.
    """
    counter = reads(precision="fp16", fused=fused, eval_interval=None)

    num_epochs = NUM_STEPS // 20
    assert counter.num_reads == NUM_STEPS - (num_epochs if fused else 0)
    assert counter.num_windows == NUM_STEPS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", [{"log_interval": "1ba"}, {"eval_interval": "1ba"},
                                   {"clip_norm": None}, {"microbatch_size": None}], ids=str)  # fmt: skip
def test_no_setting_brings_a_read(given, reads):
    """Numbers come to the host, and evaluations happen, between steps."""
    assert reads(**given).num_reads == 0


def two_terms(model, inputs, state):
    """A forward pass that logs two numbers, as that of a VAE does."""
    outputs = model(inputs)
    state.log("vae/reconstruction", outputs.square().mean())
    state.log("vae/kl", outputs.abs().mean(), "mean")
    return outputs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("interval", ["10ba", "1000ba"])
def test_numbers_that_forward_logs_bring_no_read(interval, size, reads):
    """With microbatches, whose mean they are, neither."""
    counter = reads(forward=two_terms, log_interval=interval, microbatch_size=size)

    assert (counter.num_reads, counter.num_windows) == (0, NUM_STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_step_of_two_ranks_reads_a_tensor(precision, reads):
    """What the ranks tell each other isn't read with an operation of torch."""

    def count():
        counter = reads(precision=precision)
        return counter.num_reads, counter.num_windows

    assert run_ranks(count) == [(0, NUM_STEPS)] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hook", ["batch_start", "after_loss", "after_backward", "batch_end"])
def test_a_plugin_that_reads_is_seen(hook, reads, make_plugin):
    """Control: from the first event of the window to the last."""

    def read(state):
        state.model[0].weight.sum().item()

    reader = make_plugin("z", **{hook: read})

    assert reads(reader, microbatch_size=None).num_reads == NUM_STEPS
