"""A sharded model, whose every pass is collective, and a loss that is compared with its halves."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from eventloop import Task
from eventloop_fsdp import Fsdp
from eventloop_testing import isolated_trainer, run_ranks


class UnevenAtFirst:
    """Has one sample for the second rank in its first batch, so that it has no halves there."""

    def __iter__(self):
        num_samples = 1 if torch.distributed.get_rank() == 1 else 2
        for size in (num_samples, 2, 2):
            yield torch.ones(size, 3), torch.zeros(size, dtype=torch.int64)


def num_batches(folder):
    task = Task(
        model=lambda: nn.Linear(3, 3),
        loss=cross_entropy,
        train_dataloader=UnevenAtFirst(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with isolated_trainer(folder, task, algorithms=[Fsdp()], microbatch_size=2) as trainer:
        trainer.fit()
        return trainer.state.clock.batch


def test_ranks_compare_the_loss_together_or_not_at_all(tmp_path):
    """A rank that looks alone waits for the parameters of the others until the timeout."""
    assert run_ranks(partial(num_batches, tmp_path)) == [3, 3]
