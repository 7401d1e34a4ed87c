"""The mathematics of a comparison, and draws of random numbers."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from eventloop_check.check_loss.compare import are_same_outputs, compare, fingerprints
from eventloop_check.check_loss.draws import Draws, switch_off_recurrent_dropout


def grads(*values):
    return {"weight": torch.tensor(values)}


def test_a_gradient_is_a_factor_and_what_it_leaves():
    """(3, 4) is 3 times (1, 0), and 4/5 of it are left: the sine of the angle between them."""
    found = compare(2.0, grads(3.0, 4.0), 8.0, grads(1.0, 0.0))

    assert found.loss_factor == 0.25
    assert found.scale == 3.0
    assert found.residual == pytest.approx(4 / 5)
    assert found.distance == pytest.approx(math.sqrt(4 + 16))
    assert not found.holds


def test_a_parameter_without_a_gradient_has_a_gradient_of_zero():
    """Of a part that a microbatch doesn't use."""
    both = {**grads(1.0), "other": torch.tensor([1.0])}

    found = compare(1.0, grads(1.0), 1.0, both)

    assert (found.scale, found.residual) == (0.5, pytest.approx(math.sqrt(0.5)))


@pytest.mark.parametrize("change", [1e-6, -1e-6])
def test_rounding_is_no_difference(change):
    """Sums of parts are added up in another order."""
    assert compare(1 + change, grads(1 + change, 2.0), 1.0, grads(1.0, 2.0)).holds


@pytest.mark.parametrize(
    ("loss", "gradients"),
    [(1.01, (1.0, 2.0)), (1.0, (1.01, 2.0)), (math.nan, (1.0, 2.0)), (1.0, (math.nan, 2.0))],
)
def test_a_loss_or_a_gradient_that_is_another_is_a_difference(loss, gradients):
    """Control."""
    assert not compare(loss, grads(*gradients), 1.0, grads(1.0, 2.0)).holds


def test_losses_that_cancel_each_other_are_compared_by_their_size():
    """Of advantages with mean 0, the mean is rounding alone."""
    assert compare(2e-6, grads(1.0), 1e-6, grads(1.0), size=1.0).holds
    assert not compare(2e-6, grads(1.0), 1e-6, grads(1.0)).holds


def test_gradients_of_zero_are_the_same():
    """Of frozen models, and of losses at their best."""
    assert compare(1.0, grads(0.0), 1.0, {}).holds
    assert not compare(1.0, grads(1.0), 1.0, grads(0.0)).holds


def test_fingerprints_leave_the_padding_out():
    """Its outputs may be anything."""
    outputs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[True, True, False], [True, False, False]])
    other = outputs.clone()
    other[~real] = 7.0

    expected = fingerprints(outputs, real)
    assert [len(one) for one in expected] == [2, 1]
    assert are_same_outputs(fingerprints(other, real), expected)
    assert are_same_outputs(fingerprints(outputs + 0.1, real), expected) is False
    assert are_same_outputs(fingerprints(outputs), expected) is None


# Draws


def test_dropout_is_off_in_whatever_way_it_is_called():
    """By modules, functions, attention and recurrent layers; each place is told once."""
    inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    memory = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
    assert switch_off_recurrent_dropout(memory) == [""]

    def passes():
        kept = F.scaled_dot_product_attention(inputs, inputs, inputs, dropout_p=0.5)
        through = attention(inputs, inputs, inputs)[0] + memory(inputs)[0]
        return kept + through + F.dropout(inputs, 0.5) + nn.Dropout1d(0.5)(inputs)

    with Draws() as draws:
        one, other = passes(), passes()

    assert torch.equal(one, other)
    assert len(draws.dropouts) == 3
    assert not draws.found


def test_dropout_that_does_nothing_is_not_told():
    """A model in evaluation mode has none."""
    with Draws() as draws:
        F.dropout(torch.ones(2), 0.5, training=False)
        F.dropout(torch.ones(2), 0.0)

    assert not draws.dropouts


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda: torch.randn(2), "torch's randn at test_check_loss_compare.py, line"),
        (lambda: torch.zeros(2).bernoulli_(0.5), "torch's bernoulli_ at"),
        (lambda: torch.rand(1, generator=torch.Generator()), "torch's rand at"),
        (random.random, "Python's random"),
        (lambda: np.random.rand(), "numpy.random"),
    ],
)
def test_what_draws_is_told(draw, told):
    """Two passes over a sample would differ."""
    with Draws() as draws:
        draw()

    (found,) = draws.found
    assert found.startswith(told)


def test_other_draws_are_those_that_come_next():
    """Of the generator that the model has, too, whatever seeds it."""
    first, second = torch.rand(2, generator=torch.Generator().manual_seed(0))

    with Draws(is_other=True):
        found = torch.rand((), generator=torch.Generator().manual_seed(0))

    assert found == second != first
