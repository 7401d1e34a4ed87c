"""On an accelerator that Composer has no object for, but torch has."""

from __future__ import annotations

import composer
import composer.loggers
import pytest
import torch
from composer_cases import CASES, MORE, Case, ours, trained, trainer_of
from composer_watched import linear

from eventloop_testing import pretend_device as switched_on


class Moves(composer.Callback):
    """Has Composer's state move a tensor, as its algorithms do."""

    def __init__(self):
        self.seen = set()

    def batch_start(self, state, logger):
        self.seen |= {state.device.tensor_to_device(torch.zeros(1)).device, state.batch[0].device}


def test_what_composers_state_moves_is_there(pretend_device):
    """Where the batches are."""
    moves = Moves()

    trainer_of(ours, Case(list, linear), device="gpu", callbacks=[moves]).fit()

    assert moves.seen == {pretend_device}


# Composer makes its masks on the host, but for CUDA.
NOT_THERE = {"GyroDropout"}
# Within 1e-7.
NOT_EQUAL = {"ChannelsLast"}
KINDS = {**CASES, **MORE}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", [one for one in KINDS if one not in NOT_THERE | NOT_EQUAL])
def test_it_trains_there_to_the_bits_of_the_cpu(name):
    """Random numbers are drawn as on the host."""
    expected = trained(ours, KINDS[name], device="cpu")

    with switched_on(draws_from_host=True):
        actual = trained(ours, KINDS[name], device="gpu")

    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_an_accelerator_of_no_name_is_logged_as_one(pretend_device):
    """Not as the CPU, whose methods its object has."""
    logger = composer.loggers.InMemoryLogger()

    trainer_of(ours, Case(list, linear), device="gpu", loggers=[logger]).fit()

    assert logger.hyperparameters["num_accelerators_per_node"] == 1
