"""Functions as metrics: their means, sums over ranks and checkpoints, without torchmetrics."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from eventloop import Task
from eventloop.checkpoint.states import counts_of, put_counts
from eventloop.training.metrics import MeanOf
from eventloop_testing import isolated_trainer, run_ranks


def mean_of(values):
    """A metric that takes one of these at each update, the mean of two samples."""
    state = SimpleNamespace(
        device=torch.device("cpu"), current_count=lambda: SimpleNamespace(samples=2)
    )
    taken = iter(values)
    return MeanOf("a test", lambda *_: next(taken), state, is_higher=None)


def updated(metric, times):
    for _ in range(times):
        metric.update(None, None)
    return metric


def test_the_samples_of_all_updates_count_alike():
    """A value for each sample, or their mean."""
    metric = updated(mean_of([1.0, torch.tensor([2.0, 4.0])]), 2)

    assert metric.compute().item() == 2.0
    metric.reset()
    assert (metric.compute(), metric.update_called) == ({}, False)


def test_a_copy_has_sums_of_its_own():
    """A batch that is tried with smaller microbatches takes the copies."""
    metric = updated(mean_of([1.0, 3.0]), 1)

    kept = copy.deepcopy(metric)
    updated(metric, 1)

    assert (kept.compute().item(), metric.compute().item()) == (1.0, 2.0)


def test_what_was_saved_can_be_computed_before_the_next_update():
    """A run may be saved at the last batch before an interval ends."""
    counts = counts_of({"error": updated(mean_of([1.0, 3.0]), 2)})
    resumed = mean_of([5.0])

    put_counts({"error": resumed}, counts)

    assert resumed.compute().item() == 2.0
    assert updated(resumed, 1).compute().item() == 3.0


def trained(tmp_path):
    """Trains and evaluates; rank 0 asks once more, alone, for what was computed."""
    data = TensorDataset(torch.arange(12.0).reshape(12, 1), torch.zeros(12, 1))
    task = Task(
        model=lambda: nn.Linear(1, 1),
        loss=mse_loss,
        train_dataloader=DataLoader(data, 2),
        eval_dataloaders=DataLoader(data, 2),
        metrics={"size": lambda outputs, targets: outputs.abs().amax(1)},
        optimizer=lambda model: SGD(model.parameters(), lr=1e-3),
    )
    with isolated_trainer(tmp_path, task, device="cpu") as trainer:
        found = trainer.fit().metrics["eval"]
        if trainer.state.rank == 0:
            again = trainer.state.metrics["eval/eval"]["size"].compute()
            assert again == found["size"]
        with torch.no_grad():
            outputs = trainer.state.model(data.tensors[0]).double()
        expected = {"size": outputs.abs().mean().item(), "loss": outputs.square().mean().item()}
        return {name: value.item() for name, value in found.items()}, expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_mean_is_over_the_samples_of_all_ranks(num_ranks, tmp_path):
    """Each rank has the same; a rank that asks again waits for no other."""
    for found, expected in run_ranks(trained, tmp_path, world_size=num_ranks):
        assert found == pytest.approx(expected)
