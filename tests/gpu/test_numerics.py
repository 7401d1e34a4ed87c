"""What a GPU computes: the plain loop's bits, and in other ways of computing the same to rounding."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

NUM_STEPS = 12

# What the compilers of torch warn of, TF32 or how they split a sum, says nothing of eventloop.
compiles = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def compiled_anew():
    """What other tests compiled doesn't count."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def plain(make_cnn, make_images):
    """Trains by a loop written by hand, in microbatches; gives the weights."""

    def plain(mode, microbatch_size, clip_norm):
        torch.manual_seed(0)
        model = make_cnn().to(mode.device).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = StepLR(optimizer, step_size=3, gamma=0.5)
        for inputs, targets in itertools.islice(itertools.cycle(make_images()), NUM_STEPS):
            inputs, targets = inputs.to(mode.device), targets.to(mode.device)
            parts = zip(inputs.split(microbatch_size), targets.split(microbatch_size), strict=True)
            for some_inputs, some_targets in parts:
                is_cast = mode.precision == "bf16"
                with torch.autocast(mode.device.type, torch.bfloat16, enabled=is_cast):
                    loss = cross_entropy(model(some_inputs), some_targets)
                (loss * (len(some_inputs) / len(inputs))).backward()
            clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return model.state_dict()

    return plain


@pytest.fixture
def trained(make_run):
    """Trains with eventloop; gives the weights."""

    def trained(device, task=None, **settings):
        trainer = make_run(device, task, **{"max_duration": f"{NUM_STEPS}ba"} | settings)
        trainer.fit()
        return trainer.state.model.state_dict()

    return trained


def same_bits(one, other):
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_those_of_the_plain_loop(precision, device, mode_of, math_of, plain, trained):
    """Bit by bit, where the same kernels compute each time."""
    mode = mode_of(device, precision)
    math_of(mode, deterministic=True)
    expected = plain(mode, 8, 0.2)
    settings = {"precision": precision, "deterministic": True, "microbatch_size": 8}
    task = {"scheduler": lambda one: StepLR(one, step_size=3, gamma=0.5)}

    actual = trained(device, task, clip_norm=0.2, **settings)

    assert same_bits(actual, expected)
    assert not same_bits(trained(device, task, clip_norm=0.3, **settings), expected)  # control


def test_two_runs_are_the_same_bit_by_bit(mode, trained):
    """In every precision, with dropout, where `deterministic` is asked for."""
    settings = {"precision": mode.precision, "deterministic": True}

    one, other = (trained(mode.device, **settings) for _ in range(2))

    assert same_bits(one, other)
    assert not same_bits(one, trained(mode.device, seed=1, **settings))  # control


@pytest.fixture
def losses(make_run, make_plugin, make_cnn):
    """Trains without dropout; gives the loss of each step, as loggers are told it."""

    def losses(device, **settings):
        found = []
        listener = make_plugin(
            log=lambda numbers: found.extend(
                value for name, value in numbers.items() if name == "train/loss"
            )
        )
        task = {"model": lambda: torch.nn.Sequential(
            *(one for one in make_cnn() if not isinstance(one, torch.nn.Dropout)))}  # fmt: skip
        settings = {"max_duration": f"{NUM_STEPS}ba"} | settings
        make_run(device, task, callbacks=[listener], **settings).fit()
        return torch.tensor(found)

    return losses


def near(actual, expected, tolerance):
    return len(actual) == len(expected) and bool((actual - expected).abs().max() < tolerance)


def test_every_precision_learns_what_fp32_does(mode, losses):
    """The loss of each step within 0.05, where it starts at 2.3."""
    expected = losses(mode.device)

    actual = losses(mode.device, precision=mode.precision)

    assert expected[0] - expected[-1] > 0.2
    assert near(actual, expected, 0.05)
    assert not near(
        losses(mode.device, precision=mode.precision, seed=1), expected, 0.05
    )  # control


@compiles
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_code_computes_what_eager_code_does(precision, compiler, losses):
    """One region of forward and loss; no loss is written over by a later step."""
    device, compile = compiler
    expected = losses(device, precision=precision)

    actual = losses(device, precision=precision, compile=compile)

    assert near(actual, expected, 1e-3 if precision == "fp32" else 0.05)
    assert len(set(actual.tolist())) == NUM_STEPS


@compiles
def test_compiled_microbatches_add_up(device_of_kernels, losses):
    """Their gradients and losses, kept until the last one is computed."""
    device = device_of_kernels
    compile = {"cpu": {"backend": "aot_eager"}, "cuda": True}[device.type]
    expected = losses(device, microbatch_size=8)

    actual = losses(device, microbatch_size=8, compile=compile)

    assert near(actual, expected, 1e-3)


def test_a_generator_draws_on_the_device(device, make_run):
    """A plugin's own: the same numbers in each run, others under another name."""
    states = [make_run(device).state for _ in range(2)]

    one, same = (torch.rand(4, device=device, generator=each.generator("a")) for each in states)
    other = torch.rand(4, device=device, generator=states[0].generator("b"))

    assert states[0].generator("a").device == device
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
