"""The mean loss of an epoch goes on where a checkpoint was saved."""

from __future__ import annotations

import pytest
import torch

from eventloop.distributed.processes import Processes
from eventloop.training.running_means import AT_ONCE, EpochLoss


def loss_of(values) -> EpochLoss:
    kept = EpochLoss(torch.device("cpu"))
    return added(kept, values)


def added(kept: EpochLoss, values) -> EpochLoss:
    for samples, value in values:
        kept.each.append((samples, torch.tensor(value)))
        if len(kept.each) == AT_ONCE:
            kept.fold()
    return kept


@pytest.mark.parametrize("saved_at", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 3])
def test_a_mean_that_was_saved_is_that_of_all_batches(saved_at):
    """Whether the losses before were added up already, or stood one by one."""
    draw = torch.Generator().manual_seed(0)
    values = [
        (3 if idx % 5 else 2, torch.rand((), generator=draw).item())
        for idx in range(2 * AT_ONCE + 10)
    ]
    whole = loss_of(values).mean(Processes())

    resumed = EpochLoss(torch.device("cpu"))
    resumed.load_state_dict(loss_of(values[:saved_at]).state_dict() | {"value": None})
    mean = added(resumed, values[saved_at:]).mean(Processes())

    expected = sum(samples * value for samples, value in values) / sum(one for one, _ in values)
    assert torch.equal(mean, whole)
    assert mean.item() == pytest.approx(expected, rel=1e-6)
