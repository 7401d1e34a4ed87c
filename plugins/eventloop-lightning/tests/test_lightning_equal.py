"""What Lightning's own trainer makes of a module, ours makes, to the bit."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lit_cases import CASES, Net, fitted, told

import eventloop_lightning


@pytest.mark.parametrize("name", CASES)
def test_a_module_ends_with_the_weights_of_lightnings_own_trainer(name):
    """Other results would be a reason not to change; metrics, rates and draws are equal, too."""
    theirs = told(*fitted(pl.Trainer, CASES[name]))

    ours = told(*fitted(eventloop_lightning.Trainer, CASES[name]))

    assert ours == theirs


def test_one_draw_more_would_show():
    """The control: a comparison that holds whatever is drawn would prove nothing."""

    class Draws(Net):
        def on_train_epoch_start(self):
            torch.rand(1)

    theirs = told(*fitted(pl.Trainer, CASES["plain"]))
    case = type(CASES["plain"])(Draws)

    ours = told(*fitted(eventloop_lightning.Trainer, case))

    assert ours != theirs
