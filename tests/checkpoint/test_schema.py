"""What the core reads from a checkpoint: of the form that it was written in, or refused by name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from eventloop.checkpoint.schema import RANK, TRAINING
from eventloop.forms import FormError
from eventloop.rng import get_rng_state, set_rng_state
from eventloop.training.optimizers import fitting_scheduler


def parts_of(make_trainer, make_task):
    trainer = make_trainer(make_task(scheduler=lambda optimizer: StepLR(optimizer, 2)))
    trainer.fit(until="2ba")
    return trainer.state.capture().parts


def test_what_a_run_writes_is_accepted(make_trainer, make_task):
    """The negative control: the core's own part, and what a rank knows alone."""
    parts = parts_of(make_trainer, make_task)

    TRAINING(parts["training"], "training")
    RANK(parts["rank0"], "rank0")


@pytest.mark.parametrize(
    ("part", "path", "value", "says"),
    [
        ("training", ("loop", "saved_at"), -2, "loop.saved_at is -2, not between -1"),
        ("training", ("loop", "is_finished"), 1, "loop.is_finished is 1, not a bool"),
        ("training", ("clock", "now"), [0, 1], "clock.now has 2 entries, not 5"),
        ("training", ("bookkeeping", "history"), [{"loss": "x"}], "bookkeeping.history[0].loss is 'x'"),
        ("training", ("feeds", "was_rebuilt"), None, "feeds.was_rebuilt is None, not a bool"),
        ("training", ("precision", "scaler"), 1, "precision.scaler is 1, not values by name"),
        ("training", ("saver", "metric"), 1, "saver.metric is 1, not a str"),
        ("rank0", ("feed", "num_taken"), 2**60, "feed.num_taken is 1152921504606846976, not between"),
        ("rank0", ("feed", "world_size"), 0, "feed.world_size is 0, not between 1"),
        ("rank0", ("feed", "position"), {"x": 1}, "feed.position is the position of no kind of data"),
        ("rank0", ("loss", "total"), torch.ones(2), "loss.total is a tensor of shape (2,), not a"),
        ("rank0", ("loss", "counts"), [-1], "loss.counts[0] is -1, not between 0"),
    ],
)  # fmt: skip
def test_what_no_run_writes_is_refused_by_name(part, path, value, says, make_trainer, make_task):
    """Each part of the core's state, before anything is restored."""
    parts = parts_of(make_trainer, make_task)
    parts[part][path[0]][path[1]] = value

    with pytest.raises(FormError) as caught:
        {"training": TRAINING, "rank0": RANK}[part](parts[part], part)

    message = str(caught.value)
    assert message.removeprefix(f"{part}.").startswith(says)


def test_a_scheduler_keeps_its_methods_and_its_optimizer():
    """Torch's `load_state_dict` sets whatever names there are, `step` too."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = StepLR(optimizer, 2)
    state = scheduler.state_dict()

    hostile = {**state, "step": 1, "optimizer": 2, "__class__": 3, "nothing": 4}

    assert fitting_scheduler(scheduler, hostile) == state
    with pytest.raises(ValueError, match="last_epoch"):
        fitting_scheduler(scheduler, {**state, "last_epoch": "x"})


@pytest.mark.parametrize("position", [-1, 625, 2**31 - 1, "x", None])
def test_a_position_beyond_a_generators_words_is_refused(position):
    """NumPy takes any, and would draw from whatever lies there in memory."""
    generator = np.random.Generator(np.random.MT19937(0))
    standing = get_rng_state(generator)
    standing["state"]["pos"] = position

    with pytest.raises(ValueError, match="not a position"):
        set_rng_state(generator, standing)


@pytest.mark.parametrize(
    "generator",
    [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()],
    ids=lambda one: type(one).__name__,
)
def test_a_generator_goes_on_from_where_it_stood(generator):
    """The negative control, of each kind."""
    standing = get_rng_state(generator)

    set_rng_state(generator, standing)

    assert str(get_rng_state(generator)) == str(standing)
