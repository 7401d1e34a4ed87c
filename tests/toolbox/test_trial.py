"""A trial tells what a model can't take, and leaves nothing behind."""

from __future__ import annotations

import torch
from torch import nn

from eventloop.toolbox.trial import refusal


def make_model():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
    model[0].eval()
    return model


def test_a_model_that_takes_it_refuses_nothing():
    """One sample will do, even for a batch norm that is in training mode."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))

    assert refusal(model, torch.zeros(1, 3)) is None
    assert refusal(model, input=torch.zeros(1, 3)) is None


def test_what_a_model_raises_is_given():
    """Whoever asks decides what follows."""
    error = refusal(make_model(), torch.zeros(1, 4))

    assert isinstance(error, RuntimeError)
    assert isinstance(refusal(make_model()), TypeError)


def test_nothing_is_left_of_a_trial():
    """Modes, statistics, gradients and random numbers are as they were, also after an error."""
    model, before = make_model().train(), torch.get_rng_state()
    model[0].eval()
    kept = {name: one.clone() for name, one in model.state_dict().items()}

    for width in (3, 4):
        refusal(model, torch.ones(2, width))

    assert [one.training for one in model] == [False, True, True]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(kept[name], one) for name, one in model.state_dict().items())
    assert model[2].weight.grad is None
