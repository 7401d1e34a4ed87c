"""A trial tells what a model can't take, and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from eventloop.toolbox import refusal

SMALL, WHOLE = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 8, 8)


def make_model(*head):
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), *head)


def pooled():
    return make_model(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))


def fixed():
    return make_model(nn.Flatten(), nn.Linear(3 * 6 * 6, 2))


def test_a_model_that_takes_it_refuses_nothing():
    """One sample will do, even for a batch norm that is in training mode."""
    assert refusal(pooled(), SMALL, WHOLE) is None
    assert refusal(pooled(), {"input": SMALL}, {"input": WHOLE}) is None


@pytest.mark.parametrize("last", [nn.Linear(3 * 6 * 6, 2), nn.LazyLinear(2)], ids=["fixed", "lazy"])
def test_what_a_model_raises_is_given(last):
    """Lazy modules, too, that small inputs would make too small for whole ones later."""
    error = refusal(make_model(nn.Flatten(), last), SMALL, WHOLE)

    assert isinstance(error, RuntimeError)


def test_a_model_that_takes_no_whole_inputs_is_not_judged():
    """The task calls it with other arguments; a failure says nothing of sizes."""
    assert refusal(nn.Bilinear(1, 1, 1), SMALL, WHOLE) is None


def test_lazy_modules_stay_lazy():
    """They would have the shapes and weights of a trial, not of the training."""
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.AdaptiveAvgPool2d(1))

    assert refusal(model, SMALL, WHOLE) is None
    assert all(map(is_lazy, model.parameters()))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("make", [pooled, fixed])
def test_nothing_is_left_of_a_trial(make):
    """Modes, statistics, gradients and random numbers are as they were, also after an error."""
    model, before = make(), torch.get_rng_state()
    model[0].eval()
    kept = {name: one.clone() for name, one in model.state_dict().items()}

    refusal(model, SMALL, WHOLE)

    assert [one.training for one in model] == [False, *[True] * (len(model) - 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(kept[name], one) for name, one in model.state_dict().items())
    assert model[-1].weight.grad is None
