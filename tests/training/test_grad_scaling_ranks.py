"""fp16 on several ranks: what overflows on one is skipped by all."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from eventloop import hookimpl
from eventloop_testing import isolated_trainer, run_ranks


def found(state) -> dict:
    """What a skipped step may or may not change."""
    return {
        "weights": [param.detach().clone() for param in state.model.parameters()],
        "rate": state.optimizers["sgd"].param_groups[0]["lr"],
        "scale": state.precision.state_dict()["scaler"]["scale"],
    }


class OverflowOnOneRank:
    """Has a gradient overflow on the last rank, before the ranks reduce it."""

    name = "overflow-on-one-rank"

    @hookimpl
    def after_load(self, state):
        def infinite(grad):
            return grad + torch.inf if state.clock.batch >= 3 else grad

        if state.rank == state.world_size - 1:
            state.model.weight.register_hook(infinite)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_all_ranks_skip_what_overflowed_on_one(microbatch_size, fused, make_task, tmp_path):
    """50 times: weights and schedulers rest, the scale halves, and each time is logged."""
    task = make_task(
        optimizer=lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused),
        scheduler=lambda one: StepLR(one, step_size=1, gamma=0.5),
    )

    def train():
        overflows = []

        class Listener:
            @hookimpl
            def log(self, numbers):
                overflows.append(numbers["train/overflow"])

        settings = {"precision": "fp16", "microbatch_size": microbatch_size, "max_duration": "53ba"}
        plugins = {"algorithms": [OverflowOnOneRank()], "callbacks": [Listener()]}
        with isolated_trainer(tmp_path, task, **plugins, **settings) as trainer:
            trainer.fit(until="3ba")
            before = found(trainer.state)
            trainer.fit()
            return before, found(trainer.state), overflows

    ranks = run_ranks(train)

    assert len(ranks) == 2
    assert ranks[0][2][3:] == [1.0] * 50
    for before, after, _ in ranks:
        assert all(map(torch.equal, before["weights"], after["weights"]))
        assert after["rate"] == before["rate"]
        assert after["scale"] == before["scale"] * 0.5**50
