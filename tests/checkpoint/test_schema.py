"""What the core reads from a checkpoint: of the form that it was written in, or refused by name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from eventloop.checkpoint.schema import (
    BEST,
    CLOCK,
    INT,
    PRECISION,
    TENSOR,
    FormError,
    by_name,
    each,
    optional,
)
from eventloop.rng import get_rng_state, set_rng_state
from eventloop.training.optimizers import fitting_scheduler

NOW = [1, 8, 32, 0, 0.5]
STATE = {"now": NOW, "previous": NOW, "epoch_start": NOW}


@pytest.mark.parametrize(
    ("value", "form", "says"),
    [
        (STATE | {"now": [1, -5, 32, 0, 0.5]}, CLOCK, "c.now[1] is -5, not between 0"),
        (STATE | {"now": [1, 2**62, 32, 0, 0.5]}, CLOCK, "c.now[1] is 4611686018427387904"),
        (STATE | {"now": [True, 8, 32, 0, 0.5]}, CLOCK, "c.now[0] is True, not an int"),
        (STATE | {"now": [1, 8, 32, 0, float("nan")]}, CLOCK, "c.now[4] is nan"),
        (STATE | {"now": NOW[:4]}, CLOCK, "c.now has 4 entries, not 5"),
        ({"now": NOW, "previous": NOW}, CLOCK, "c has no 'epoch_start'"),
        (None, CLOCK, "c is None, not values by name"),
        ({"metric": "max eval/accuracy"}, optional(BEST, {}), "c has no 'value'"),
        ({"scaler": {}, "num_skipped": 0}, optional(PRECISION, {}), "c.scaler has no 'scale'"),
        ([torch.ones(2), "x"], each(TENSOR), "c[1] is 'x', not a Tensor"),
        ({"a": 1, 2: 3}, by_name(INT), "a key of c is 2, not a str"),
    ],
)
def test_the_message_has_the_path_and_the_value(value, form, says):
    """A name in a nest of thousands of values is worth more than a KeyError."""
    with pytest.raises(FormError) as caught:
        form(value, "c")

    assert str(caught.value).startswith(says)


def test_what_a_run_writes_has_its_form():
    """The negative control."""
    CLOCK(STATE, "c")
    optional(BEST, {})({}, "c")
    CLOCK({**STATE, "of a later version": 1}, "c")


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
