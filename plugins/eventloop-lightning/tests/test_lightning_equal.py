"""What Lightning's own trainer makes of a module, ours makes, to the bit."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import pytest
import torch
from lit_cases import CASES, Net, fitted, told

import eventloop_lightning


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
def test_a_module_ends_with_the_weights_of_lightnings_own_trainer(name):
    """Other results would be a reason not to change; metrics, rates and draws are equal, too."""
    theirs = told(*fitted(pl.Trainer, CASES[name]))

    ours = told(*fitted(eventloop_lightning.Trainer, CASES[name]))

    assert ours == theirs


@pytest.mark.parametrize("kind", [pl.Trainer, eventloop_lightning.Trainer])
@pytest.mark.parametrize("action", ["ignore", "default", "error"])
def test_filters_of_the_users_hold_where_a_loss_broadcasts(kind, action):
    """Those set before, and those that a callback sets."""

    class Filters(pl.Callback):
        def on_fit_start(self, trainer, module):
            warnings.filterwarnings("ignore", "a filter of the user's")

    raised = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings(action, "Using a target size")
        try:
            fitted(kind, CASES["a loss that broadcasts"], callbacks=[Filters()])
        except UserWarning as error:
            raised = str(error)
        filters = [str(one[1] and one[1].pattern) for one in warnings.filters]

    has_warned = any("Using a target size" in str(one.message) for one in caught)
    assert has_warned == (action == "default")
    assert ("Using a target size" in raised) == (action == "error")
    assert "a filter of the user's" in filters
    assert filters.count("Using a target size") == 1


def test_one_draw_more_would_show():
    """The control: a comparison that holds whatever is drawn would prove nothing."""

    class Draws(Net):
        def on_train_epoch_start(self):
            torch.rand(1)

    theirs = told(*fitted(pl.Trainer, CASES["plain"]))
    case = type(CASES["plain"])(Draws)

    ours = told(*fitted(eventloop_lightning.Trainer, case))

    assert ours != theirs
