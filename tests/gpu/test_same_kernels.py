"""A step is made of the kernels of a plain loop, and of no others; on the CPU, of its operations."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop import hookimpl

NUM_WARM_UP = 5
NUM_STEPS = 10
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
# What has no kernel on a GPU: other views of the same memory, a batch that is asked to come and is
# there, and the fit's last loss, which is brought to the host for the history.
NO_KERNEL = {"aten::detach", "detach", "aten::to", "aten::item", "aten::_local_scalar_dense"}
NO_KERNEL |= {"aten::unsqueeze", "aten::as_strided"}  # of losses that are stacked once a fit


@pytest.fixture
def mode(mode_of_kernels):
    """Not on the pretend accelerator, which has none of its own."""
    return mode_of_kernels


@pytest.fixture
def device(device_of_kernels):
    """Likewise."""
    return device_of_kernels


@pytest.fixture
def computed(timeline):
    """Returns kernels, or operations of the CPU, by name and with their number, in ten steps.

    What runs once a fit, such as a look at the weights at both of its ends, isn't counted.
    """

    def recorded(run, num_steps, device):
        activities = timeline.record(lambda: run(num_steps), device)
        if device.type == "cuda":
            return timeline.counts(activities, "kernel"), copies_to_device(activities)
        counts = timeline.counts(activities, "cpu_op")
        return {name: one for name, one in counts.items() if name not in NO_KERNEL}, 0

    def computed(run, device):
        run(NUM_WARM_UP)
        fewer, fewer_copies = recorded(run, NUM_STEPS, device)
        more, more_copies = recorded(run, 2 * NUM_STEPS, device)
        return Counter(more) - Counter(fewer), more_copies - fewer_copies

    return computed


def copies_to_device(activities):
    return sum(one.kind == "gpu_memcpy" and "HtoD" in one.name for one in activities)


@pytest.fixture
def plain_run(make_cnn, make_images):
    """Returns a function that makes so many steps of a loop written by hand."""

    def plain_run(mode, optimizer):
        torch.manual_seed(0)
        model = make_cnn().to(mode.device).train()
        if mode.precision == "bf16":
            for module in model.modules():
                if isinstance(module, nn.Conv2d):
                    module.to(memory_format=torch.channels_last)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        batches = itertools.cycle(make_images())

        def run(num_steps):
            for inputs, targets in itertools.islice(batches, num_steps):
                inputs = inputs.to(mode.device, non_blocking=True)
                targets = targets.to(mode.device, non_blocking=True)
                is_cast = mode.precision == "bf16"
                with torch.autocast(mode.device.type, torch.bfloat16, enabled=is_cast):
                    loss = cross_entropy(model(inputs), targets)
                loss.backward()
                stepper.step()
                stepper.zero_grad()

        return run

    return plain_run


@pytest.fixture
def eventloop_run(make_run, make_images):
    """Returns a function that makes so many steps of `Trainer.fit`, within one epoch.

    At the end of an epoch the mean of its losses is computed, which a plain loop doesn't.
    """

    def eventloop_run(mode, optimizer, *algorithms):
        make = OPTIMIZERS[optimizer]
        task = {
            "optimizer": lambda model: make(model.parameters()),
            "train_dataloader": [*make_images()] * 100,
        }
        trainer = make_run(mode.device, task, precision=mode.precision, algorithms=algorithms,
                           max_duration="1000ba")  # fmt: skip
        torch.backends.cudnn.benchmark = False  # it chooses by time, not the same ones each time

        def run(num_steps):
            trainer.fit(until=f"{trainer.state.clock.batch + num_steps}ba")

        return run

    return eventloop_run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ten_steps_run_the_kernels_of_ten_plain_ones(
    precision, optimizer, device, mode_of, math_of, computed, plain_run, eventloop_run
):
    """By name and number: what the hooks around them add is nothing that the device computes."""
    mode = mode_of(device, precision)
    math_of(mode)
    expected, num_copies = computed(plain_run(mode, optimizer), device)

    actual = computed(eventloop_run(mode, optimizer), device)

    assert len(expected) > 10
    assert actual == (expected, num_copies)


class Adds:
    """Makes the step one kernel longer."""

    @hookimpl
    def batch_end(self, state):
        state.loss.sqrt()


def test_a_kernel_more_is_seen(device, mode_of, math_of, computed, plain_run, eventloop_run):
    """Control: one square root, in each of ten steps."""
    mode = mode_of(device)
    math_of(mode)
    expected, _ = computed(plain_run(mode, "sgd"), device)

    actual, _ = computed(eventloop_run(mode, "sgd", Adds()), device)

    assert sum(actual.values()) == sum(expected.values()) + NUM_STEPS


def test_another_precision_has_other_kernels(device, mode_of, math_of, computed, plain_run):
    """Control: the names say in what is computed."""
    in_fp32, in_bf16 = (
        computed(plain_run(mode_of(device, precision), "sgd"), device)
        for precision in ("fp32", "bf16")
    )

    assert in_fp32 != in_bf16
