"""Strides and shared tensors of an optimizer's state survive a copy."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from eventloop.checkpoint.optimizer_layouts import layouts_of, restore_layouts


def optimizer_with(state):
    """Returns an optimizer of two parameters, the second of which has a state."""
    params = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 3, 4, 5))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.state[params[1]] = state
    return optimizer


def state_of(optimizer):
    return optimizer.state[optimizer.param_groups[0]["params"][1]]


def test_an_ordinary_state_has_no_layout():
    """A checkpoint doesn't grow for it."""
    assert layouts_of({"sgd": optimizer_with({"step": 1, "sum": torch.zeros(2, 3, 4, 5)})}) == {}


def test_strides_and_shared_tensors_are_restored():
    """Also in lists and dicts within a state."""
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    optimizer = optimizer_with({"last": last, "views": [{"again": last}], "whole": torch.zeros(3)})
    layouts = json.loads(json.dumps(layouts_of({"sgd": optimizer})))
    copied = {"last": last.contiguous(), "views": [{"again": last.clone()}], "whole": torch.ones(3)}
    other = optimizer_with(copy.deepcopy(copied))

    restore_layouts({"sgd": other}, layouts)

    state = state_of(other)
    assert state["last"].stride() == last.stride()
    assert torch.equal(state["last"], last)
    assert state["views"][0]["again"] is state["last"]
    assert state["whole"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "layout",
    [
        {"strides": [[[1, "step"], [1]]], "shared": []},
        {"strides": [[[1, "sum"], [-1, 1, 1, 1]]], "shared": []},
        {"strides": [[[7, "sum"], [1]]], "shared": []},
        {"strides": [], "shared": [[[1, "sum"], [1, "__class__"]]]},
        {"strides": [], "shared": [[[1], [1, "sum"]]]},
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout):
    """It comes from a file."""
    other = optimizer_with({"step": 1, "sum": torch.zeros(2, 3, 4, 5)})

    with pytest.raises((LookupError, TypeError, ValueError)):
        restore_layouts({"sgd": other}, {"sgd": layout})
